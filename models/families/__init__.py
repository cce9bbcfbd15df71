"""One file per architecture: it reads config.json, and defines the differences from the shared decoder."""

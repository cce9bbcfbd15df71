"""One file for each architecture: its config.json, and what differs in it from the shared decoder."""

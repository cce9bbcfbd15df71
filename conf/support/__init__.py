"""What the config and all layers above use: terminal text, signals, sizes."""

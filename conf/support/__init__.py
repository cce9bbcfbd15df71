"""Helpers of the config and of all layers above it: terminal text, signals, sizes."""

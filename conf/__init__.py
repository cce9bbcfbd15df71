"""Configuration. `schema.py` and its imports declare every option; the folders hold the option files."""

"""Floor 0, the configuration: `schema.py` and the files that it imports declare every knob, the folders hold the options of each group."""

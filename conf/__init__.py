"""Floor 0, the configuration: `schema.py` holds every knob, the YAML folders hold the options of each group."""

"""The tasks of `run.py`: one module each. `launch` runs the one that the config names."""

"""The stages from a config to an engine: resolve a model, plan it, calibrate, shard, load."""

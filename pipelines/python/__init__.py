"""The Python interfaces: `pipeline()`, `LLM`, streamers. `pipelines` exports their public names."""

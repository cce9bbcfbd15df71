"""Floor 2, the models: one file per architecture, shared layers, checkpoints, tokenizers. `tiny/` is the bundled model."""

"""The models: one file per architecture, shared layers, checkpoint formats, tokenizers, exported models and the bundled
model `tiny`.
"""

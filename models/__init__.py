"""The models: one file per architecture, shared layers, checkpoint formats, tokenizers and the bundled model `tiny`.

They form floor 2 of the layering.
"""

"""Exported models: the traced graph of a model in a folder. It runs without the model's code."""

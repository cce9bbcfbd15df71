"""Floor 1, the operators: one folder each. `reference.py` is the specification in plain PyTorch; faster versions stand beside it.

transformers looks for a package of this name: keep this file light and without a version.
"""

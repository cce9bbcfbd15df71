"""The operators, one folder each. `reference.py` is the specification in plain PyTorch; `cpu.cpp` and
`triton.py` are faster versions.

transformers looks for a package named `kernels`: keep this file light and without a version.
"""

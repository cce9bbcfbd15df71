"""Activations whose every element is computed the same way wherever it stands in a tensor."""

import math

from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) in float32, rounded once to x's dtype (arXiv 1606.08415).

    Not torch's gelu of this kind, whose arithmetic differs at the end of a tensor (see kernels/swiglu); tanh has no such seam.
    """
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)

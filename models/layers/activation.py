"""Activations whose every element is computed the same way wherever it stands in a tensor.

torch's gelu and sigmoid compute the last elements of a tensor, and of a thread's part of it, in another arithmetic than the others (see
kernels/swiglu), so that a row's bits would depend on the rows beside it. exp, erf and tanh have no such seam.
"""

import math

from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), Phi the normal distribution, in float32, rounded once to x's dtype (arXiv 1606.08415)."""
    wide = x.float()
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) in float32, rounded once to x's dtype (arXiv 1606.08415)."""
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in x's dtype."""
    return 1 / (1 + (-x).exp())

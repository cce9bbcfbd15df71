"""T tokens, F channels of the feed-forward layer.

Not torch's gelu: on a CPU its arithmetic for the last elements of a tensor, and of each thread's share, is another one, so that a row's
bits would depend on how many rows there are. erf and tanh have no such seam.
"""

import math

from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), Phi the normal distribution (arXiv 1606.08415); x and the result [T, F] in one float dtype, computed in float32."""
    wide = x.float()
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def gelu_tanh(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (arXiv 1606.08415), times `up` where it is given (arXiv 2002.05202).

    x, up and the result [T, F] in one float dtype. The activation is computed in float32 and rounded before `up` multiplies it.
    """
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    active = (0.5 * wide * (1 + inner.tanh())).to(x.dtype)
    return active if up is None else active * up

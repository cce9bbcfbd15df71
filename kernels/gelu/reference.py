"""T tokens, F channels of the feed-forward layer.

torch's gelu is not used: on a CPU it computes the last elements of a tensor, and of each thread's share, with different
arithmetic, so that the bits of a row would depend on the number of rows. torch's erf and tanh compute all elements
alike.
"""

import math

from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), where Phi is the cumulative normal distribution (arXiv 1606.08415). x and the result [T, F] have
    one float dtype; the arithmetic is float32."""
    wide = x.float()
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def gelu_tanh(x: Tensor, up: Tensor | None = None) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (arXiv 1606.08415), times `up` if given (arXiv
    2002.05202).

    x, up and the result [T, F] have one float dtype. The activation is computed in float32 and rounded before the
    product with `up`.
    """
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    active = (0.5 * wide * (1 + inner.tanh())).to(x.dtype)
    return active if up is None else active * up

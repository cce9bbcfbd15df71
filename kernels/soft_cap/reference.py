"""R rows, C numbers per row."""

from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) (arXiv 2408.00118). x and the result [R, C] have one float dtype; computed in float32
    and rounded once."""
    wide = x.float()
    return (cap * (wide / cap).tanh()).to(x.dtype)

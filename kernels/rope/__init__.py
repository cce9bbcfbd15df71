"""Rotary position embedding, applied to queries and keys."""

from torch import Tensor

from kernels.rope import reference

__all__ = ["rope"]


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """See kernels/rope/reference.py."""
    if x.is_cuda:
        from kernels.rope import triton

        return triton.rope(x, cos, sin, interleaved)
    return reference.rope(x, cos, sin, interleaved)

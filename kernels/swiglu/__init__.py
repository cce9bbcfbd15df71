"""The gated activation of Llama's feed-forward layer."""

from torch import Tensor

from kernels.swiglu import reference

__all__ = ["swiglu"]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See kernels/swiglu/reference.py."""
    if gate.is_cuda:
        from kernels.swiglu import triton

        return triton.swiglu(gate, up)
    return reference.swiglu(gate, up)

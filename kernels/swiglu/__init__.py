"""The gated activation of Llama's feed-forward layer."""

from kernels.swiglu.reference import swiglu

__all__ = ["swiglu"]

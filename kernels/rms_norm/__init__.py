"""Root mean square normalisation."""

from torch import Tensor

from kernels.rms_norm import reference

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels/rms_norm/reference.py."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See kernels/rms_norm/reference.py."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)

"""The experts of a mixture, all in one."""

from torch import Tensor

from kernels.moe import reference

__all__ = ["mixture"]


def mixture(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> Tensor:
    """See kernels/moe/reference.py."""
    if x.is_cuda:
        from kernels.moe import triton

        return triton.mixture(x, gate_up, down, weights, chosen, gate_up_scales, down_scales)
    return reference.mixture(x, gate_up, down, weights, chosen, gate_up_scales, down_scales)

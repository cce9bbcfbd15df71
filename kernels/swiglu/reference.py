"""T tokens, F channels of the feed-forward layer, G groups of channels that share a scale."""

import torch
from torch import Tensor

from kernels.quantize_rows.reference import quantize_rows


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv 2002.05202). gate, up and the result [T, F] have one float dtype; silu is computed
    in float32 and rounded once.

    torch's silu is not used: on a CPU it computes the last elements of a tensor, and of each thread's share, with
    different arithmetic, so that the bits of a row would depend on the number of rows. torch's exp computes all
    elements alike.
    """
    wide = gate.float()
    return (wide / (1 + (-wide).exp())).to(gate.dtype) * up


def swiglu_quantize(
    gate: Tensor, up: Tensor, dtype: torch.dtype, group_size: int | None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `swiglu`, rounded to its dtype, as codes [T, F] of `dtype` and scales float32 [T, G], as in
    `quantize_rows`."""
    return quantize_rows(swiglu(gate, up), dtype, group_size, static_scales)

"""T tokens, F channels of the feed-forward layer, G groups of them that share a scale."""

import torch
from torch import Tensor

from kernels.quantize_rows.reference import quantize_rows


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv 2002.05202); gate, up and the result [T, F] in one float dtype; silu is float32, rounded once.

    Not torch's silu: on a CPU its arithmetic for the last elements of a tensor, and of each thread's share, is another one, so that a
    row's bits would depend on how many rows there are. exp has no such seam.
    """
    wide = gate.float()
    return (wide / (1 + (-wide).exp())).to(gate.dtype) * up


def swiglu_quantize(
    gate: Tensor, up: Tensor, dtype: torch.dtype, group_size: int | None, static_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same, rounded to its dtype, as codes [T, F] of `dtype` and scales float32 [T, G], as of `quantize_rows`."""
    return quantize_rows(swiglu(gate, up), dtype, group_size, static_scales)

"""T tokens, D channels, G groups of channels that share a scale."""

import torch
from torch import Tensor

from kernels.quantize_rows.reference import quantize_rows


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias over the last dimension (arXiv
    1607.06450).

    x [T, D] of any float dtype; weight and bias [D], by default 1 and 0. Computed in float32 and rounded once to x's
    dtype.
    """
    wide = x.float().contiguous()  # torch adds strided numbers in another order
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm, rounded to x's dtype, as codes [T, D] of `dtype` and scales float32 [T, G], as in
    `quantize_rows`."""
    return quantize_rows(layer_norm(x, weight, bias, eps), dtype, group_size, static_scales)

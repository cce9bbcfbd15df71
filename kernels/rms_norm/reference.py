"""T tokens, D channels, G groups of channels that share a scale."""

import torch
from torch import Tensor

from kernels.quantize_rows.reference import quantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    x [T, D] of any float dtype, weight [D]; returns [T, D] in x's dtype. The normalised x is computed in float32 and
    rounded to x's dtype before the product with the weight, as in Llama's code. With an offset the factor is offset +
    weight in float32, and only the product is rounded, as in Gemma's code.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight_offset is not None:
        return ((weight_offset + weight.float()) * normalised).to(x.dtype)
    return weight * normalised.to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and x + residual, both [T, D] in x's dtype."""
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset), total


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm, rounded to x's dtype, as codes [T, D] of `dtype` and scales float32 [T, G], as in
    `quantize_rows`."""
    return quantize_rows(rms_norm(x, weight, eps, weight_offset), dtype, group_size, static_scales)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x + residual as codes and scales, and x + residual [T, D]."""
    normed, total = add_rms_norm(x, residual, weight, eps, weight_offset)
    return *quantize_rows(normed, dtype, group_size, static_scales), total

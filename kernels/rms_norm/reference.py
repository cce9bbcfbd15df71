"""T tokens, D channels, G groups of them that share a scale."""

import torch
from torch import Tensor

from kernels.quantize_rows.reference import quantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    x [T, D] of any float dtype, weight [D]; returns [T, D] in x's dtype. The normalisation is computed in float32 and rounded
    to x's dtype before the weight multiplies it, as Llama's own code does. With an offset, offset + weight multiplies it in float32, and
    the product alone is rounded, as in Gemma's.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight_offset is not None:
        return ((weight_offset + weight.float()) * normalised).to(x.dtype)
    return weight * normalised.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself, both [T, D] in x's dtype."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm, rounded to x's dtype, as codes [T, D] of `dtype` and scales float32 [T, G], as of `quantize_rows`."""
    return quantize_rows(rms_norm(x, weight, eps, weight_offset), dtype, group_size, static_scales)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x + residual as codes and scales, and x + residual itself [T, D]."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return *quantize_rows(normed, dtype, group_size, static_scales), total

"""T tokens, D channels."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    x [T, D] of any float dtype, weight [D]; returns [T, D] in x's dtype. The normalisation is computed in float32 and rounded
    to x's dtype before the weight multiplies it, as Llama's own code does.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself, both [T, D] in x's dtype."""
    total = x + residual
    return rms_norm(total, weight, eps), total

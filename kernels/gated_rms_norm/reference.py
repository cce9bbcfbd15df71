"""T tokens, C channels."""

import torch
from torch import Tensor


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    """Return z / sqrt(mean(z^2) + eps) * weight, where z is x * silu(gate) and the mean is over groups of `group_size`
    adjacent channels: the norm of Mamba-2 (arXiv 2405.21060).

    x, gate [T, C] and weight [C] have one float dtype; returns [T, C]. z and its norm are computed in float32. The norm
    is rounded before the product with the weight, as in `rms_norm`.
    """
    wide = gate.float()
    z: Tensor = (x.float() * (wide / (1 + (-wide).exp()))).unflatten(-1, (-1, group_size))
    normalised = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.flatten(-2).to(x.dtype)

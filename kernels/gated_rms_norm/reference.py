"""T tokens, C channels."""

import torch
from torch import Tensor


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float, gates_output: bool = False
) -> Tensor:
    """Return z / sqrt(mean(z^2) + eps) * weight, where z is x * silu(gate) and the mean is over groups of `group_size`
    adjacent channels: the norm of Mamba-2 (arXiv 2405.21060).

    With `gates_output`, z is x, and the result is multiplied by sigmoid(gate): the norm of Kimi Delta Attention (arXiv
    2510.26692).

    x, gate [T, C] and weight [C] have one float dtype; returns [T, C]. z and its norm are computed in float32. The norm
    is rounded before the product with the weight, as in `rms_norm`, except with `gates_output`.
    """
    wide, z = gate.float(), x.float()
    if not gates_output:
        z = z * (wide / (1 + (-wide).exp()))
    z = z.unflatten(-1, (-1, group_size))
    normalised: Tensor = (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if gates_output:
        return (weight.float() * normalised / (1 + (-wide).exp())).to(x.dtype)
    return weight * normalised.to(x.dtype)

"""T tokens, H heads, D channels per head, of which the first R are rotated."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of the first R channels of every head by the token's angles. Other channels are unchanged (arXiv
    2104.09864).

    Pairs are (x[i], x[i + R/2]), or (x[2i], x[2i + 1]) if interleaved. x [T, H, D]; cos and sin [T, R/2] in x's dtype;
    returns [T, H, D] in x's dtype.
    """
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, R/2]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)  # [T, H, R/2]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def rope_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every token's angles in float32, times `factor`, rounded to `dtype`: [T, R/2] each.

    positions int64 [T]; frequencies float32 [R/2], or [T, R/2] if they differ per token. An angle is position *
    frequency in float32.
    """
    angles = positions[:, None].float() * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

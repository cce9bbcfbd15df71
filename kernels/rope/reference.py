"""T tokens, H heads, D channels per head."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of every head by the token's angles (arXiv 2104.09864, half-split order).

    x [T, H, D]; cos and sin [T, D/2] in x's dtype; returns [T, H, D] in x's dtype.
    """
    first, second = x.chunk(2, dim=-1)  # [T, H, D/2]
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, D/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

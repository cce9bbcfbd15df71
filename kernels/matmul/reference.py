"""M rows, K inputs, N outputs, H heads: torch's products, which add up in an order that may depend on M and on the machine."""

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]."""
    return functional.linear(x, weight, bias)


def linear_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's x [M, H, K] times its own weight [H, N, K] transposed: [M, H, N]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

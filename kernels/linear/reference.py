"""M rows, K inputs, N outputs, G groups of inputs, H heads.

torch computes the products of floats. The order of its sums may depend on M and on the machine.
"""

import torch
from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]."""
    return functional.linear(x, weight, bias)


def linear_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Return every head's x [M, H, K] times its own weight [H, N, K] transposed: [M, H, N]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def dequantize(codes: Tensor, scales: Tensor, zero_points: Tensor | None, group_size: int) -> Tensor:
    """Return value[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] with g = i // group_size; zero is 0 if symmetric.

    codes int8 [N, K], scales float32 [N, G], zero points int8 [N, G] or None; returns [N, K] in the scales' dtype.
    """
    group = torch.arange(codes.shape[1], device=codes.device) // group_size  # [K]
    zeros = 0 if zero_points is None else zero_points.to(scales.dtype)[:, group]
    return (codes.to(scales.dtype) - zeros) * scales[:, group]


def int_matmul(x: Tensor, codes: Tensor, scales: Tensor, zero_points: Tensor | None, group_size: int) -> Tensor:
    """Return x [M, K] times the dequantised weight transposed, in float64: [M, N]."""
    return x.double() @ dequantize(codes, scales.double(), zero_points, group_size).T


def int8_matmul(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, zero_points: Tensor | None, group_size: int
) -> Tensor:
    """Return the product of x = x_codes * x_scales; x_codes int8 [M, K], x_scales float32 [M, 1] or [1, 1]."""
    return int_matmul(x_codes * x_scales.double(), codes, scales, zero_points, group_size)

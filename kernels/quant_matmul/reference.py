"""M rows, K inputs, N outputs, G groups of inputs."""

import torch
from torch import Tensor


def dequantize(codes: Tensor, scales: Tensor, zero_points: Tensor | None, group_size: int) -> Tensor:
    """value[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] with g = i // group_size; zero is 0 if symmetric.

    codes int8 [N, K], scales float32 [N, G], zero points int8 [N, G] or None; returns [N, K] in the scales' dtype.
    """
    group = torch.arange(codes.shape[1], device=codes.device) // group_size  # [K]
    zeros = 0 if zero_points is None else zero_points.to(scales.dtype)[:, group]
    return (codes.to(scales.dtype) - zeros) * scales[:, group]


def quant_matmul(x: Tensor, codes: Tensor, scales: Tensor, zero_points: Tensor | None, group_size: int) -> Tensor:
    """x [M, K] times the dequantised weight transposed, in float64: [M, N]."""
    return x.double() @ dequantize(codes, scales.double(), zero_points, group_size).T


def quant_matmul_int8(
    x_codes: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, zero_points: Tensor | None, group_size: int
) -> Tensor:
    """The same for x = x_codes * x_scales; x_codes int8 [M, K], x_scales float32 [M, 1] or [1, 1]."""
    return quant_matmul(x_codes * x_scales.double(), codes, scales, zero_points, group_size)

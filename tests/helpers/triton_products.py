"""Products with quantised weights on a GPU."""

import torch
from torch import Tensor

from kernels.linear import gpu_weight, triton
from tests.helpers.triton_cases import DEVICE, assert_near, noise


def random_codes(outputs: int, inputs: int, bits: int, zero_points: bool) -> Tensor:
    low, high = (0, 16) if zero_points else ((-8, 8) if bits == 4 else (-127, 128))
    return torch.randint(low, high, (outputs, inputs), generator=torch.Generator().manual_seed(3), dtype=torch.int8)


def on_device(weight: gpu_weight.GPUWeight) -> gpu_weight.GPUWeight:
    return weight.with_tensors({name: part.to(DEVICE) for name, part in weight.tensors.items()})


def values(codes: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int) -> Tensor:
    """Return the dequantised weight, float64 [N, K]."""
    group = torch.arange(codes.shape[1]) // group_size
    offset = 0 if zeros is None else zeros.double()[:, group]
    return (codes.double() - offset) * scales.double()[:, group]


def check_weight(
    rows: int, outputs: int, inputs: int, bits: int, group_size: int | None, zero_points: bool, dtype: torch.dtype
) -> None:
    group = group_size or inputs
    codes = random_codes(outputs, inputs, bits, zero_points)
    scales = noise(outputs, -(-inputs // group)).abs() + 0.1
    zeros = (codes[:, ::group] + 3).clamp(0, 15) if zero_points else None
    x = noise(rows, inputs, dtype=dtype)
    result = triton.matmul(x.to(DEVICE), on_device(gpu_weight.pack(codes, scales, zeros, bits)))
    assert_near(result, x.double() @ values(codes, scales, zeros, group).T)

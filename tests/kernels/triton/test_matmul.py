"""Products with quantised weights compared with float64 products of the dequantised weights."""

import pytest
import torch

from kernels.linear import gpu_weight, triton
from kernels.quantize_rows import QuantizedActivations
from kernels.quantize_rows.triton import quantize_rows
from tests.helpers.triton_cases import DEVICE, assert_near, noise, tiers
from tests.helpers.triton_products import check_weight, on_device, random_codes, values

ROWS = [1, 5, 17, 70]  # one per way to launch


@tiers(
    "rows, group_size, format, dtype",
    ROWS,
    [32, 64, 128, None],
    [(4, False), (4, True), (8, False)],  # bits, whether there are zero points
    [torch.float32, torch.bfloat16],
)
def test_weights_of_8_and_4_bits(
    rows: int, group_size: int | None, format: tuple[int, bool], dtype: torch.dtype
) -> None:
    bits, zero_points = format
    check_weight(rows, 70, 328, bits, group_size, zero_points, dtype)  # neither is a multiple of a tile


@tiers("rows, format, one_scale", ROWS, [(8, None), (4, 64), (4, None)], [False, True])
def test_rows_of_int8(rows: int, format: tuple[int, int | None], one_scale: bool) -> None:
    bits, group_size = format
    codes = random_codes(70, 328, bits, False)
    scales = noise(70, -(-328 // (group_size or 328))).abs()
    x_codes, x_scales = quantize_rows(noise(rows, 328).to(DEVICE))
    x_scales = x_scales[:1] if one_scale else x_scales
    weight = on_device(gpu_weight.pack(codes, scales, None, bits))
    result = triton.matmul(QuantizedActivations(x_codes, x_scales, torch.float32), weight)
    x = x_codes.cpu().double() * x_scales.cpu().double()
    # integers are exact: only the float32 scaling rounds
    assert_near(result, x @ values(codes, scales, None, group_size or 328).T, 1e-6)


# scale group of the weight in outputs and inputs; scale group of the rows in inputs
FLOAT8 = [
    ("tensor", None, None),
    ("rows", None, None),
    ("blocks", 128, 128),
    ("blocks", 128, None),
    ("groups", 64, 128),
]


@tiers("rows, format", ROWS, FLOAT8)
def test_float8(rows: int, format: tuple[str, int | None, int | None]) -> None:
    kind, group_size, x_group_size = format
    outputs, inputs = 140, 328
    codes = (noise(outputs, inputs) * 50).to(torch.float8_e4m3fn)
    groups = 1 if group_size is None else -(-inputs // group_size)
    scales = noise(1 if kind == "tensor" else outputs, groups).abs() + 0.1
    if kind == "blocks":
        scales = scales[::128].repeat_interleave(128, 0)[:outputs]
    x_codes, x_scales = quantize_rows(noise(rows, inputs).to(DEVICE), torch.float8_e4m3fn, x_group_size)
    weight = on_device(gpu_weight.pack(codes, scales, None, 8))
    assert weight.has_blocks == (kind == "blocks")  # its scales are stored once
    result = triton.matmul(QuantizedActivations(x_codes, x_scales, torch.float32, x_group_size), weight)
    row_values = values(x_codes.cpu(), x_scales.cpu(), None, x_group_size or inputs)
    # Hopper's matrix units add float8 products of a chunk with 14 bits
    tolerance = 1e-3 if DEVICE == "cuda" else 1e-5
    assert_near(result, row_values @ values(codes, scales.expand(outputs, -1), None, group_size or inputs).T, tolerance)
    x = noise(rows, inputs, dtype=torch.bfloat16)
    unrounded = triton.matmul(x.to(DEVICE), weight)
    assert_near(unrounded, x.double() @ values(codes, scales.expand(outputs, -1), None, group_size or inputs).T)


def test_refuses_scales_that_do_not_belong_to_the_weight() -> None:
    codes = noise(8, 256).to(torch.float8_e4m3fn)
    weight = on_device(gpu_weight.pack(codes, noise(8, 2), None, 8))
    x_codes, x_scales = quantize_rows(noise(2, 256).to(DEVICE), torch.float8_e4m3fn, 64)
    with pytest.raises(ValueError, match=r"scales \[2, 4\] of groups of 64 inputs for a weight with groups of 128"):
        triton.matmul(QuantizedActivations(x_codes, x_scales, torch.float32, 64), weight)


def test_refuses_other_shapes() -> None:
    codes = random_codes(8, 96, 8, False)
    with pytest.raises(ValueError, match="5 groups of 96 inputs: a group has 32, 64 or 128 inputs, or all of them"):
        gpu_weight.pack(codes, torch.ones(8, 5), None, 8)
    weight = gpu_weight.pack(codes, torch.ones(8, 1), None, 8)
    with pytest.raises(ValueError, match=r"rows \[2, 95\] cannot be multiplied by a weight of 96 inputs"):
        triton.matmul(torch.ones(2, 95), weight)

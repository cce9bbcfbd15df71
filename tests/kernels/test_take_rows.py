"""Rows of packed weights, as a tied embedding looks them up, against the weights that were packed."""

import pytest
import torch
from torch import Tensor

from kernels.linear import GPUWeight, PackedWeight, lookup, pack, pack_blocks, pack_codes, pack_float8
from kernels.linear.block_weight import KINDS, read_blocks
from kernels.linear.gpu_weight import of_floats
from kernels.linear.gpu_weight import pack as pack_for_gpu
from kernels.linear.packed import take_rows
from quantization.codes import CodeKind
from quantization.weight_format import QuantizedWeight, WeightFormat, quantize
from tests.helpers.cases import each
from tests.helpers.gguf_files import random_blocks
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way

DTYPES = torch.float32, torch.bfloat16, torch.float16
SIZES = [(1, 96), (17, 96), (50, 640)]
FP8 = CodeKind.FP8
FORMATS = [
    WeightFormat(8),
    WeightFormat(8, group_size=32),
    WeightFormat(4, group_size=32),
    WeightFormat(4, symmetric=False),
    WeightFormat(4, symmetric=False, group_size=32),
    WeightFormat(8, FP8),
    WeightFormat(8, FP8, group_size=32),
]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def numbers_of(num_rows: int) -> Tensor:
    """Numbers in no order, some twice, and two that are outside."""
    return torch.tensor([num_rows - 1, 0, num_rows // 2, num_rows - 1, -1, num_rows])


def expect_rows(rows: Tensor, weight: Tensor) -> None:
    assert rows[:4].equal(weight[numbers_of(len(weight))[:4]].to(rows.dtype))
    assert rows[4:].isnan().all()


@any_way
@each("dtype", DTYPES)
@poisoned()
def test_rows_are_those_of_the_weight_that_was_packed(dtype: torch.dtype) -> None:
    for shape in [(1, 1), (17, 33), (50, 64), (4096, 515)]:  # the last one is compressed if it is bfloat16
        weight = randn(*shape).to(dtype)
        expect_rows(lookup(pack(weight), numbers_of(shape[0]), dtype), weight)
        assert lookup(pack(weight), numbers_of(0)[:0], dtype).shape == (0, shape[1])
    for shape in SIZES:
        for format in FORMATS:
            stored = quantize(randn(*shape), format)
            expect_rows(lookup(packed(stored, format), numbers_of(shape[0]), dtype), stored.dequantize())
    for kind in KINDS:
        blocks = torch.from_numpy(random_blocks(kind, 17, 512, seed=0))
        expect_rows(lookup(pack_blocks(kind, blocks), numbers_of(17), dtype), read_blocks(kind, blocks).dequantize())


def packed(stored: QuantizedWeight, format: WeightFormat) -> PackedWeight | GPUWeight:
    if format.kind is FP8:
        return pack_float8(stored.codes, stored.scales)
    return pack_codes(stored.codes, stored.scales, stored.zero_points, format.bits)


@each("dtype", DTYPES)
def test_gpu_layouts_and_refused_arguments(dtype: torch.dtype) -> None:
    for shape in SIZES:
        inside = numbers_of(shape[0])[:4]
        weight = randn(*shape).to(dtype)
        assert lookup(of_floats(weight), inside, dtype).equal(weight[inside])
        for format in FORMATS:
            stored = quantize(randn(*shape), format)
            on_gpu = pack_for_gpu(stored.codes, stored.scales, stored.zero_points, format.bits)
            assert lookup(on_gpu, inside, dtype).equal(stored.dequantize()[inside].to(dtype))
    of_squares = torch.full((2, 5), 0.5).repeat_interleave(128, 0)[:200]  # a scale for each 128 x 128
    codes = randn(200, 640).to(torch.float8_e4m3fn)
    on_gpu = pack_for_gpu(codes, of_squares, None, 8)
    assert on_gpu.has_blocks
    assert lookup(on_gpu, torch.tensor([199, 3]), dtype).equal((codes[[199, 3]].float() * 0.5).to(dtype))
    packed_weight = pack(randn(4, 8).bfloat16())
    for numbers, rows_dtype in (
        (torch.zeros(2, dtype=torch.int32), torch.bfloat16),
        (torch.zeros(1, 2, dtype=torch.int64), torch.bfloat16),
        (torch.zeros(2, dtype=torch.int64), torch.float32),
    ):
        with pytest.raises(ValueError, match=r"rows of|row numbers"):
            take_rows(packed_weight, numbers, rows_dtype)

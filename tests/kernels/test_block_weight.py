"""Weights in ggml's blocks: their values compared with the gguf package, products with float64, and bits that do not
depend on the batch."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.linear import (
    BlockWeight,
    WeightGroup,
    grouped_matmul,
    lookup,
    matmul,
    matmul_swiglu,
    matmul_together,
    pack_blocks,
)
from kernels.linear.block_weight import FP4_VALUES, KINDS, pack_portably, read_blocks
from kernels.quantize_rows import Activations, QuantizedActivations, quantize_rows
from kernels.swiglu import swiglu
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.gguf_files import random_blocks
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 33]  # tiles need 16 or more
SHAPES = [(1, 256), (15, 512), (16, 256), (70, 768)]
BITS = {"Q4_0": 4.5, "Q8_0": 8.5, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "NVFP4": 4.5 + 64 / (16 * 256)}
BITS |= {"Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q3_K": 3.4375, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
GLOBAL_SCALE = 1 / 2.689  # not a float32
FLOAT32 = 2**-20  # of the sum of magnitudes: the rounding of a float32 sum over the groups of 768 inputs


def blocks_of(kind: str, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of a file, and the package's dequantisation of them."""
    raw = random_blocks(kind, num_outputs, num_inputs, seed=num_outputs)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(raw), torch.from_numpy(np.array(expected))


def randn(num_rows: int, num_inputs: int) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_inputs))


@any_way
@each("kind", KINDS)
@poisoned()
def test_numbers_are_the_packages_to_the_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear.block_weight.PACKED_AT_ONCE", 10000)  # several pieces, the last one shorter
    for shape in [*SHAPES, (17, 3 * KINDS[kind].block_size)]:
        raw, expected = blocks_of(kind, *shape)
        assert read_blocks(kind, raw).dequantize().equal(expected)
        expected = read_blocks(kind, raw, GLOBAL_SCALE).dequantize()  # other kinds than NVFP4 have no global scale
        weight = pack_blocks(kind, raw, GLOBAL_SCALE)
        tiles = pack_portably(kind, raw)
        assert weight.memory[: len(tiles)].equal(tiles), shape
        assert (weight.num_outputs, weight.num_inputs) == shape
        assert weight.unpack().dequantize().equal(expected)
        assert lookup(weight, torch.arange(shape[0]), torch.float32).equal(expected)
        assert (
            weight.slice_outputs(slice(shape[0] // 2, shape[0])).unpack().dequantize().equal(expected[shape[0] // 2 :])
        )


def test_global_scales_multiply_or_divide() -> None:
    """Files of compressed-tensors divide scales by a float32: float64 products with its reciprocal round to the same."""
    raw = torch.arange(127, dtype=torch.uint8).repeat_interleave(4)  # each scale of e4m3
    raw = torch.cat((raw.view(127, 4), torch.arange(32, dtype=torch.uint8).expand(127, 32) * 41), 1)
    codes = read_blocks("NVFP4", raw)
    scales = codes.factors[0, :, :1]
    numbers = FP4_VALUES[codes.codes[0].int()]
    for number in torch.randn(200, generator=torch.Generator().manual_seed(0)).exp().tolist():
        number = torch.tensor(number * 448 * 6)
        assert read_blocks("NVFP4", raw, 1 / number.double().item()).dequantize().equal(numbers * (scales / number))
        assert read_blocks("NVFP4", raw, number.item()).dequantize().equal(numbers * (scales * number))


def test_bits_of_a_weight() -> None:
    """A packed weight has at most 3 % more bytes than in the file: Q4_K and Q5_K pack the scales of groups into six
    bits there, and NVFP4 has another tensor for its global scale."""
    assert KINDS.keys() == BITS.keys()
    for kind, bits in BITS.items():
        raw, _ = blocks_of(kind, 16, 256)
        size = pack_blocks(kind, raw).memory.numel()
        assert 8 * size == bits * 16 * 256
        assert raw.numel() <= size < 1.03 * raw.numel()


@any_way
@each("kind", KINDS)
@poisoned()
def test_products_match_the_numbers(kind: str) -> None:
    for shape in SHAPES:
        raw, _ = blocks_of(kind, *shape)
        weight, x, bias = pack_blocks(kind, raw, GLOBAL_SCALE), randn(17, shape[1]), randn(1, shape[0])[0]
        codes = read_blocks(kind, raw, GLOBAL_SCALE)
        values = codes.dequantize()
        expected = x.double() @ values.double().T + bias
        # With minimums a value is the difference of two larger numbers, each multiplied by the row's fixed point.
        magnitudes = BlockMagnitudes(codes.dequantize(), codes.factors, codes.scales, kind).of(x)
        error = 2**-16 * magnitudes + FLOAT32 * magnitudes + 1e-6
        assert ((matmul(x, weight, bias) - expected).abs() <= error).all(), shape
        rounded = int8_rows(x)
        values_of_rows = rounded.codes.double() * rounded.scales.double().repeat_interleave(32, 1)
        error = (
            4 * FLOAT32 * magnitudes + 1e-6
        )  # sums of groups are exact; a scale and its product with a sum are rounded
        assert ((matmul(rounded, weight, bias) - values_of_rows @ values.double().T - bias).abs() <= error).all(), shape


def int8_rows(x: Tensor) -> QuantizedActivations:
    return QuantizedActivations(*quantize_rows(x, torch.int8, 32), x.dtype, 32)


class BlockMagnitudes:
    """Bounds on the terms of a product: the largest input of each group times the largest value of its codes."""

    def __init__(self, values: Tensor, factors: Tensor, scales: Tensor, kind: str) -> None:
        self._size = KINDS[kind].group_size
        groups = values.abs().unflatten(1, (-1, self._size)).sum(2)
        if KINDS[kind].has_minimums:
            minimums = factors[1].repeat_interleave(KINDS[kind].block_size // self._size, 1)
            minimums = minimums * scales[1] if KINDS[kind].has_scales else minimums
            groups = groups + 2 * self._size * minimums.abs()
        self._groups = groups.double()

    def of(self, x: Tensor) -> Tensor:
        return x.double().abs().unflatten(1, (-1, self._size)).amax(2) @ self._groups.T


@compiled
@each("dtype", [torch.float32, torch.bfloat16])
@each("kind", KINDS)
@poisoned()
def test_a_rows_bits_do_not_depend_on_its_company(kind: str, dtype: torch.dtype) -> None:
    raw, _ = blocks_of(kind, 70, 768)
    weight, other, floats = (
        pack_blocks(kind, raw, GLOBAL_SCALE),
        pack_blocks(kind, raw.flip(0).contiguous(), 2.0),
        randn(33, 768).to(dtype),
    )
    for x in (floats, int8_rows(floats)):
        check_company(x, weight, other, randn(1, 70)[0].to(dtype))


def check_company(x: Activations, weight: BlockWeight, other: BlockWeight, bias: Tensor) -> None:
    set_threads(1)
    batch_result = matmul(x, weight, bias)
    for num_threads, num_rows in enumerate(ROWS, start=1):
        set_threads(num_threads % 4 + 1)
        first, last = (part_of(x, rows) for rows in (slice(num_rows), slice(-num_rows, None)))
        assert matmul(last, weight, bias).equal(batch_result[-num_rows:]), num_rows
        assert matmul(first, weight, bias).equal(batch_result[:num_rows]), num_rows
        together = matmul_together(first, [other, weight], [None, bias])
        assert together[1].equal(batch_result[:num_rows])
        gated = matmul_swiglu(first, weight, other, bias, None)
        assert gated.equal(swiglu(together[1], together[0]))
    starts = torch.tensor([0, 5, 5, 33])
    grouped = grouped_matmul(x, WeightGroup([weight, weight, weight]), starts)
    assert grouped.equal(matmul(x, weight))


def part_of(x: Activations, rows: slice) -> Activations:
    if isinstance(x, Tensor):
        return x[rows]
    return QuantizedActivations(x.codes[rows], x.scales[rows], x.dtype, x.group_size)


@any_way
@each("kind", KINDS)
def test_rows_that_are_not_finite(kind: str) -> None:
    raw, _ = blocks_of(kind, 16, 256)
    many = randn(17, 256)
    many[0, 7], many[1, 7], many[2] = float("nan"), float("inf"), 0
    for rows in (many[:4], int8_rows(many[:4]), many, int8_rows(many)):
        y = matmul(rows, pack_blocks(kind, raw))
        assert not y[:2].isfinite().any()
        assert y[2].eq(0).all()
        assert y[3:].isfinite().all()


@compiled
def test_inputs_that_fill_no_step_of_tiles() -> None:
    set_threads(2)
    raw, values = blocks_of("Q5_0", 70, 96)
    x = randn(33, 96)
    y = matmul(x, pack_blocks("Q5_0", raw))
    assert torch.cat([matmul(row[None], pack_blocks("Q5_0", raw)) for row in x]).equal(y)
    error = (
        (2**-16 + FLOAT32) * x.abs().amax() * values.abs().sum(1)
    )  # each input is rounded to its group's fixed point
    assert ((y - x.double() @ values.double().T).abs() <= error + 1e-6).all()


def test_invalid_block_weights_and_products_are_refused() -> None:
    raw, _ = blocks_of("Q4_K", 16, 256)
    weight = pack_blocks("Q4_K", raw)
    with pytest.raises(ValueError, match="a packed weight of 4736 bytes, of 256 inputs in blocks of 256, cannot be"):
        BlockWeight(weight.memory, 32, 256, "Q4_K")
    with pytest.raises(ValueError, match="in blocks of 256, cannot be"):
        BlockWeight(weight.memory, 16, 257, "Q4_K")
    codes, scales = quantize_rows(randn(2, 256), torch.int8, None, None)
    with pytest.raises(ValueError, match=r"scales \[2, 1\] for 2 rows: one for 32 inputs"):
        matmul(QuantizedActivations(codes, scales, torch.float32), weight)
    with pytest.raises(ValueError, match="cannot be multiplied together"):
        matmul_together(randn(2, 256), [weight, pack_blocks("Q5_K", blocks_of("Q5_K", 16, 256)[0])], [None, None])

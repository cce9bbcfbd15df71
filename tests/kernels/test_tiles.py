"""Products on the tiles of the AMX unit, and with kernels/tiles.h in plain C++, compared with the arithmetic that Intel
documents."""

import multiprocessing
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import (
    WeightGroup,
    grouped_matmul,
    linear,
    matmul,
    matmul_swiglu,
    pack,
    pack_codes,
    pack_float8,
)
from kernels.linear.compressed import common_upper_bytes, compress_with
from kernels.linear.float_weight import FloatWeight
from kernels.quantize_rows import Activations, QuantizedActivations, quantize_rows
from kernels.swiglu import swiglu
from tests.helpers.cases import each
from tests.helpers.ways import by_ways, computing, instruction_sets

ROWS = (1, 2, 5, 16, 17, 33, 70)
SIZES = ((1, 1), (15, 31), (17, 33), (33, 95), (70, 258), (130, 1056))  # outputs, inputs
LEAST_NORMAL = np.float32(2.0**-126)

by_tiles = by_ways(lambda: instruction_sets("amx"))


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < LEAST_NORMAL, np.float32(0), x)


def documented(x: Tensor, weight: Tensor) -> Tensor:
    """Compute TDPBF16PS over 32 inputs at a time: [M, N]. A product of two bfloat16 is exact in float32, so adding it
    is a fused multiply-add."""
    padding = -x.shape[1] % 32
    a, b = (flush(functional.pad(operand.float(), (0, padding)).numpy()) for operand in (x, weight))
    total = np.zeros((len(a), len(b)), np.float32)
    with np.errstate(all="ignore"):
        for step in range(0, a.shape[1], 32):
            sums = [np.zeros_like(total), np.zeros_like(total)]  # of even and of odd inputs
            for i in range(32):
                product = a[:, None, step + i].astype(np.float64) * b[None, :, step + i]
                sums[i % 2] = flush((sums[i % 2] + product).astype(np.float32))
            total = flush(total + flush(sums[0] + sums[1]))
    return torch.from_numpy(total)


def numbers(kind: str, *shape: int) -> Tensor:
    if kind == "normal":
        return torch.randn(shape).bfloat16()
    if kind == "wide":
        return (torch.randn(shape) * 2.0 ** torch.randint(-60, 60, shape)).bfloat16()
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(
        torch.bfloat16
    )  # any bits: denormals, infinity, NaN


def compressed(weight: FloatWeight) -> FloatWeight:
    upper_bytes, num_exceptions = common_upper_bytes(weight.memory)
    return FloatWeight(compress_with(upper_bytes, num_exceptions, weight.memory), weight.num_outputs, weight.num_inputs)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Compare bit for bit; any NaN equals any other."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.long
@by_tiles
@each("kind", ["normal", "wide", "any"])
@each("num_outputs, num_inputs", SIZES)
def test_sums_of_bfloat16_are_the_documented_ones(num_outputs: int, num_inputs: int, kind: str) -> None:
    weight = numbers("normal" if kind == "any" else kind, num_outputs, num_inputs)
    packed = pack(weight)
    for num_rows in ROWS:
        x = numbers(kind, num_rows, num_inputs)
        expected = documented(x, weight).bfloat16()
        assert_equal(matmul(x, packed), expected)
        assert_equal(matmul(x, compressed(packed)), expected)
        assert_equal(linear(x, weight), expected)


@by_tiles
@each("bad", [float("nan"), float("inf"), 1e-39])
def test_a_row_does_not_see_its_neighbours(bad: float) -> None:
    weight = pack(numbers("normal", 40, 95))
    x = numbers("normal", 37, 95)
    alone = matmul(x, weight)
    beside = x.clone()
    beside[[0, 15, 17, 36]] = bad
    mixed = matmul(beside, weight)
    kept = [i for i in range(37) if i not in (0, 15, 17, 36)]
    assert torch.equal(mixed[kept], alone[kept])


@pytest.mark.long
@by_tiles
@each("codes", [True, False])
@each(
    "bits, group, zero_points",
    [(8, 0, False), (8, 32, False), (8, 128, False), (4, 32, True), (4, 64, False), (4, 0, True)],
)
def test_products_of_integers_have_the_bits_of_vectors(bits: int, group: int, zero_points: bool, codes: bool) -> None:
    for num_outputs, num_inputs in (*SIZES, (40, 2050)):
        least = 0 if zero_points else -(2 ** (bits - 1))
        groups = -(-num_inputs // (group or num_inputs))

        def weight(n: int = num_outputs, k: int = num_inputs, g: int = groups, least: int = least) -> object:
            zeros = torch.randint(0, 16, (n, g), dtype=torch.int8) if zero_points else None
            return pack_codes(
                torch.randint(least, least + 2**bits, (n, k), dtype=torch.int8), torch.rand(n, g), zeros, bits
            )

        gate, up = weight(), weight()
        for num_rows in ROWS:
            rows = torch.randn(num_rows, num_inputs).bfloat16()
            if not codes and num_rows > 2:
                rows[1] = float("nan")
            x = QuantizedActivations(*quantize_rows(rows), rows.dtype) if codes else rows
            actual = matmul(x, gate), matmul_swiglu(x, gate, up)
            with computing("avx2"):
                expected = matmul(x, gate), matmul_swiglu(x, gate, up)
            for one, other in zip(actual, expected, strict=True):
                assert_equal(one, other)


def documented_float8(x: Activations, codes: Tensor, scales: Tensor) -> Tensor:
    """Return [M, N] float32: each group's sum, padded with zeros to whole steps, times both scales, added to the groups
    before it."""
    groups = scales.shape[1]
    rows = x.codes if isinstance(x, QuantizedActivations) else x
    x_scales = x.scales.expand(-1, groups) if isinstance(x, QuantizedActivations) else torch.ones(len(x), groups)
    total = torch.zeros(len(rows), len(codes))
    for g, (part, code) in enumerate(zip(rows.chunk(groups, 1), codes.chunk(groups, 1), strict=True)):
        factor = (x_scales[:, g, None] * scales[:, g]).double()  # one rounding: both are float32
        total = (documented(part, code).double() * factor + total).float()
    return total


def random_float8(*shape: int) -> Tensor:
    """Return any finite codes, including codes below 2^-6."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return codes.where((codes & 127) != 127, 0).view(torch.float8_e4m3fn)


@pytest.mark.long
@by_tiles
@each("kind", ["normal", "any", "codes", "codes of groups"])
@each("num_outputs, num_inputs, groups", [(1, 1, 1), (15, 31, 1), (33, 96, 3), (70, 210, 7), (130, 1056, 1)])
def test_sums_of_float8_are_the_documented_ones(num_outputs: int, num_inputs: int, groups: int, kind: str) -> None:
    codes, up_codes = random_float8(num_outputs, num_inputs), random_float8(num_outputs, num_inputs)
    scales = torch.rand(num_outputs, groups)
    gate, up = pack_float8(codes, scales), pack_float8(up_codes, scales)
    for num_rows in ROWS:
        x: Activations = numbers("any" if kind == "any" else "normal", num_rows, num_inputs)
        if kind.startswith("codes"):
            size = num_inputs // groups if kind == "codes of groups" else None
            x = QuantizedActivations(
                random_float8(num_rows, num_inputs), torch.rand(num_rows, groups if size else 1), torch.float32, size
            )
        expected, ups = documented_float8(x, codes, scales), documented_float8(x, up_codes, scales)
        assert_equal(matmul(x, gate), expected.to(x.dtype))
        assert_equal(matmul_swiglu(x, gate, up), swiglu(expected.to(x.dtype), ups.to(x.dtype)))
        bias = torch.randn(num_outputs).to(x.dtype)
        assert_equal(matmul(x, gate, bias), expected.to(x.dtype) + bias)


EXPERTS = {
    "bfloat16": lambda: pack(numbers("normal", 40, 96)),
    "float8": lambda: pack_float8(random_float8(40, 96), torch.rand(40, 3)),
    "int8": lambda: pack_codes(torch.randint(-128, 128, (40, 96), dtype=torch.int8), torch.rand(40, 1), None, 8),
    "int4": lambda: pack_codes(
        torch.randint(0, 16, (40, 96), dtype=torch.int8),
        torch.rand(40, 3),
        torch.randint(0, 16, (40, 3), dtype=torch.int8),
        4,
    ),
}


WEIGHTS = {  # [33, 95]
    "bfloat16": lambda: pack(numbers("normal", 33, 95)),
    "12 bits": lambda: compressed(pack(numbers("normal", 33, 95))),
    "float8": lambda: pack_float8(random_float8(33, 95), torch.rand(33, 19)),
    "int8": lambda: pack_codes(torch.randint(-128, 128, (33, 95), dtype=torch.int8), torch.rand(33, 1), None, 8),
    "int4": lambda: pack_codes(torch.randint(-8, 8, (33, 95), dtype=torch.int8), torch.rand(33, 3), None, 4),
}


@by_tiles
@each("codes", [False, True])
@each("kind", WEIGHTS)
def test_any_number_of_rows_gives_the_bits_of_all(kind: str, codes: bool) -> None:
    if codes and kind in ("bfloat16", "12 bits"):
        return
    weight, rows = WEIGHTS[kind](), numbers("normal", 512, 95)
    rows[[7, 69, 300]] = float("nan")
    quantised = quantize_rows(rows, torch.float8_e4m3fn if kind == "float8" else torch.int8)
    batch_result = matmul(QuantizedActivations(*quantised, rows.dtype) if codes else rows, weight)
    for count in range(1, 71):
        some = QuantizedActivations(*(part[:count] for part in quantised), rows.dtype) if codes else rows[:count]
        assert_equal(matmul(some, weight), batch_result[:count])


@by_tiles
@each("codes", [False, True])
@each("kind", EXPERTS)
def test_rows_sorted_by_expert_have_the_bits_of_each_alone(kind: str, codes: bool) -> None:
    if codes and kind == "bfloat16":
        return
    counts = [0, 1, 17, 0, 33, 5]
    gates, ups = ([EXPERTS[kind]() for _ in counts] for _ in range(2))
    starts = torch.tensor([0, *counts]).cumsum(0)
    x: Activations = numbers("normal", sum(counts), 96)
    if codes:
        x = QuantizedActivations(*quantize_rows(x, torch.float8_e4m3fn if kind == "float8" else torch.int8), x.dtype)
    products = grouped_matmul(x, WeightGroup(gates), starts)
    gated = grouped_matmul(x, WeightGroup(gates), starts, WeightGroup(ups))
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        for row in range(int(starts[expert]), int(starts[expert + 1])):
            one = slice(row, row + 1)
            alone = QuantizedActivations(x.codes[one], x.scales[one], x.dtype) if codes else x[one]
            assert torch.equal(products[one], matmul(alone, gate))
            assert torch.equal(gated[one], matmul_swiglu(alone, gate, up))


def product_in_a_child(expected: Tensor, send: Callable[[bool], None]) -> None:
    x, weight = torch.ones(20, 64).bfloat16(), pack(torch.ones(20, 64).bfloat16())
    send(torch.equal(matmul(x, weight), expected))


@pytest.mark.forks
@by_tiles
def test_tiles_belong_to_threads_and_children_and_not_to_torch() -> None:
    ready, results = threading.Event(), []
    older = threading.Thread(target=lambda: (ready.wait(), results.append(matmul(x, weight))))
    older.start()  # before the process requests tiles
    x, weight = torch.ones(20, 64).bfloat16(), pack(torch.ones(20, 64).bfloat16())
    expected = matmul(x, weight)
    torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()  # may configure the tiles of this thread
    assert torch.equal(matmul(x, weight), expected)
    ready.set()
    older.join()
    assert torch.equal(results[0], expected)
    receiving, sending = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=product_in_a_child, args=(expected, sending.send))
    child.start()
    child.join()
    assert receiving.recv()

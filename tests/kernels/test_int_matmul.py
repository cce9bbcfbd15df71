"""The quantised products compared with float64, and bits that do not depend on the batch and the number of threads."""

import pytest
import torch
from torch import Tensor

from kernels import build
from kernels.linear import Float8Weight, IntWeight, matmul, pack_codes, pack_float8, reference
from kernels.quantize_rows import Activations, QuantizedActivations, quantize_rows
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.integer_weights import FORMATS, make
from tests.helpers.poison import poisoned
from tests.helpers.tiers import tiers
from tests.helpers.ways import any_way, compiled, computing, every_way

ROWS = [1, 2, 3, 7, 8, 9, 63, 65]
SHAPES = [
    (1, 8),
    (15, 31),
    (16, 32),
    (17, 64),
    (100, 65),
    (1, 127),
    (17, 127),
    (15, 1000),
    (100, 1000),
    (16, 4096),
    (17, 4096),
]
QUICK = [(8, 0, False), (8, 32, False), (4, 32, True), (4, 128, False)]  # of FORMATS; the remaining formats are long
FLOAT32 = 2**-20  # of the sum of magnitudes: the rounding of a float32 sum over the groups of 4096 inputs


def randn(num_rows: int, num_inputs: int) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_inputs))


def first_rows(x: QuantizedActivations, count: int) -> QuantizedActivations:
    return QuantizedActivations(x.codes[:count], x.scales[:count], x.dtype, x.group_size)


def fixed_point_error(x: Tensor, values: Tensor, group: int) -> Tensor:
    """Return the largest error of fixed point: 2^-16 of the largest of 128 inputs (or of a smaller group), times the
    weights."""
    parts = x.double().abs().split(min(group, 128), dim=1)
    largest = torch.cat([part.amax(1, keepdim=True).expand_as(part) for part in parts], dim=1)
    return 2**-16 * largest @ values.abs().T


@each("bits, group, zeros", FORMATS)
def test_unpacks_to_what_was_packed(bits: int, group: int, zeros: bool) -> None:
    for num_outputs, num_inputs in SHAPES:
        codes, scales, points, size = make(num_outputs, num_inputs, bits, group, zeros)
        packed = pack_codes(codes, scales, points, bits)
        assert packed.group_size == size
        again = packed.unpack()
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)
        assert points is None if again[2] is None else torch.equal(again[2], points)


@pytest.mark.parametrize(("bits", "group", "zeros"), tiers(FORMATS, QUICK, FORMATS))
def test_weight_only_equals_float64_and_with_the_kernels_itself_in_any_batch(
    bits: int, group: int, zeros: bool
) -> None:
    for num_outputs, num_inputs in SHAPES:
        codes, scales, points, size = make(num_outputs, num_inputs, bits, group, zeros)
        x, values = randn(max(ROWS), num_inputs), reference.dequantize(codes, scales.double(), points, size)
        expected = reference.int_matmul(x, codes, scales, points, size)
        allowed = fixed_point_error(x, values, size) + FLOAT32 * (x.double().abs() @ values.abs().T)
        for way in every_way():
            with computing(way), poisoned():
                packed = pack_codes(codes, scales, points, bits)
                batch_result = matmul(x, packed)
                assert ((batch_result - expected).abs() <= allowed).all()
                for num_rows in ROWS:
                    part = matmul(x[:num_rows], packed)
                    assert ((part - expected[:num_rows]).abs() <= allowed[:num_rows]).all()
                    assert way == "torch" or torch.equal(part, batch_result[:num_rows])


@pytest.mark.long
@pytest.mark.parametrize(("bits", "group", "zeros"), tiers(FORMATS, QUICK, FORMATS))
def test_int8_equals_exact_integers_and_itself_in_any_batch(bits: int, group: int, zeros: bool) -> None:
    for num_outputs, num_inputs in SHAPES:
        codes, scales, points, size = make(num_outputs, num_inputs, bits, group, zeros)
        x_codes, x_scales = quantize_rows(randn(max(ROWS), num_inputs))
        x_codes[0], x_codes[1] = -128, 127  # the largest sums
        x = QuantizedActivations(x_codes, x_scales, torch.float32)
        one_scale = QuantizedActivations(x_codes, x_scales[:1], torch.float32)
        same_scales = QuantizedActivations(x_codes, x_scales[:1].expand(max(ROWS), 1), torch.float32)
        expected = reference.int8_matmul(x_codes, x_scales, codes, scales, points, size)
        values = reference.dequantize(codes, scales.double(), points, size)
        allowed = FLOAT32 * ((x_codes * x_scales).double().abs() @ values.abs().T)
        for way in every_way():
            with computing(way), poisoned():
                packed = pack_codes(codes, scales, points, bits)
                batch_result = matmul(x, packed)
                assert ((batch_result - expected).abs() <= allowed).all()
                for num_rows in ROWS:
                    assert torch.equal(matmul(first_rows(x, num_rows), packed), batch_result[:num_rows])
                assert torch.equal(matmul(one_scale, packed), matmul(same_scales, packed))


@pytest.mark.long
@compiled
@each("bits, group, zeros", [(8, 0, False), (4, 32, True), (4, 128, False)])
def test_bits_do_not_depend_on_rows_or_threads(bits: int, group: int, zeros: bool) -> None:
    packed, x = pack_codes(*make(100, 321, bits, group, zeros)[:3], bits), randn(512, 321)
    set_threads(1)
    codes, scales = quantize_rows(x)
    batch_result, batch_result_int8 = (
        matmul(x, packed),
        matmul(QuantizedActivations(codes, scales, torch.float32), packed),
    )
    for num_threads in (1, 2, 3, 4):
        set_threads(num_threads)
        for rows in [*range(1, 41), 64, 65, 512]:
            assert torch.equal(matmul(x[-rows:], packed), batch_result[-rows:]), (num_threads, rows)
            part = quantize_rows(x[-rows:])
            assert torch.equal(part[0], codes[-rows:])
            assert torch.equal(matmul(QuantizedActivations(*part, torch.float32), packed), batch_result_int8[-rows:]), (
                num_threads,
                rows,
            )


@any_way
@each("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded_once(dtype: torch.dtype) -> None:
    packed, x = pack_codes(*make(17, 127, 8, 0, False)[:3], 8), randn(9, 127).to(dtype)
    assert torch.equal(matmul(x, packed), matmul(x.float(), packed).to(dtype))
    codes, scales = quantize_rows(x)
    assert torch.equal(quantize_rows(x.float())[0], codes)
    narrow, wide = (matmul(QuantizedActivations(codes, scales, kind), packed) for kind in (dtype, torch.float32))
    assert torch.equal(narrow, wide.to(dtype))


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("groups", [1, 4])
def test_float8_products_equal_float64(groups: int, dtype: torch.dtype) -> None:
    """Products of floats, and of codes whose sums exceed float16. With the kernels a row's bits do not depend on other
    rows."""
    generator = torch.Generator().manual_seed(0)
    codes, row_codes = (
        (448 * torch.rand(rows, 128, generator=generator)).to(torch.float8_e4m3fn) for rows in (33, max(ROWS))
    )
    scales, row_scales = torch.rand(33, groups, generator=generator) / 448, torch.rand(max(ROWS), 1) / 448
    weight, x = pack_float8(codes, scales), (row_codes.float() * row_scales).to(dtype)
    values = codes.double() * scales.double().repeat_interleave(128 // groups, 1)
    rows = QuantizedActivations(row_codes, row_scales, dtype, 128 if groups > 1 else None)
    # Everything is positive, so errors are relative. A weight, a sum and a scaled sum are rounded once each, by half a
    # unit.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-10}[dtype]
    for operand, exact in ((x, x.double()), (rows, row_codes.double() * row_scales.double())):
        batch_result = matmul(operand, weight)
        assert batch_result.dtype == dtype
        torch.testing.assert_close(batch_result.double(), exact @ values.T, rtol=tolerance, atol=0)
        for count in ROWS:
            part = (
                QuantizedActivations(row_codes[:count], row_scales[:count], dtype, rows.group_size)
                if operand is rows
                else x[:count]
            )
            assert build.library() is None or torch.equal(matmul(part, weight), batch_result[:count])


ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE_CODES = ALL_CODES[ALL_CODES.float().isfinite()]  # 254


def float8(num_outputs: int, num_inputs: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return codes, including all finite ones, and scales."""
    count = num_outputs * num_inputs
    codes = FINITE_CODES.view(torch.uint8)[(torch.arange(count) * 37 + 5) % len(FINITE_CODES)]
    scales = torch.rand(num_outputs, groups, generator=torch.Generator().manual_seed(count)) + 0.1
    return codes.view(torch.float8_e4m3fn).view(num_outputs, num_inputs), scales


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float8_code_is_exact(dtype: torch.dtype) -> None:
    """One input at a time, denormals included, at every position of a vector. NaN makes its own output NaN and no
    other."""
    codes = ALL_CODES.view(64, 4)
    products = matmul(torch.eye(4, dtype=dtype), pack_float8(codes, torch.ones(64, 1))).T
    bad = codes.float().isnan().any(1)
    assert products[~bad].equal(codes[~bad].to(dtype))
    assert products[bad].isnan().all()


@any_way
@each("num_outputs, num_inputs, groups", [(1, 1, 1), (17, 6, 2), (33, 50, 1), (100, 384, 3), (70, 200, 4)])
@poisoned()
def test_float8_of_any_shape(num_outputs: int, num_inputs: int, groups: int) -> None:
    """Compared with float64: rows of every dtype, and of codes with a scale per row, per group of the weight, per two
    groups, or for all rows."""
    codes, scales = float8(num_outputs, num_inputs, groups)
    weight, size = pack_float8(codes, scales), num_inputs // groups
    found_codes, found_scales = weight.unpack()
    assert found_codes.view(torch.uint8).equal(codes.view(torch.uint8))
    assert found_scales.equal(scales)
    assert weight.slice_outputs(slice(0, 1)).unpack()[0].float().equal(codes[:1].float())
    values = codes.double() * scales.double().repeat_interleave(size, 1)
    x = randn(max(ROWS), num_inputs)
    rows: list[tuple[Activations, Tensor]] = [
        (x.to(dtype), x.to(dtype).double()) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    for width in {None, size, 2 * size if groups % 2 == 0 else None}:
        x_codes, x_scales = quantize_rows(x, torch.float8_e4m3fn, width)
        exact = x_codes.double() * x_scales.double().repeat_interleave(width or num_inputs, 1)
        rows.append((QuantizedActivations(x_codes, x_scales, torch.float32, width), exact))
    x_codes, one = quantize_rows(x, torch.float8_e4m3fn, None, torch.tensor([0.01]))
    rows.append((QuantizedActivations(x_codes, one[:1], torch.float32), x_codes.double() * one[:1].double()))
    for operand, exact in rows:
        batch_result = matmul(operand, weight)
        unit = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}[operand.dtype]
        allowed = unit * (exact.abs() @ values.abs().T)
        assert ((batch_result.double() - exact @ values.T).abs() <= allowed).all()
        for count in ROWS:
            part = operand[:count] if isinstance(operand, Tensor) else first_rows(operand, count)
            assert build.library() is None or torch.equal(matmul(part, weight), batch_result[:count])


@compiled
def test_float8_bits_do_not_depend_on_threads() -> None:
    set_threads(1)
    weight, x = pack_float8(*float8(100, 320, 5)), randn(100, 320)
    rows = [x, x.bfloat16(), QuantizedActivations(*quantize_rows(x, torch.float8_e4m3fn, 64), torch.float16, 64)]
    alone = [matmul(operand, weight, torch.ones(100, dtype=operand.dtype)) for operand in rows]
    for num_threads in (2, 3):
        set_threads(num_threads)
        for operand, expected in zip(rows, alone, strict=True):
            assert torch.equal(matmul(operand, weight, torch.ones(100, dtype=operand.dtype)), expected)


def test_float8_that_cannot_be_packed_or_multiplied() -> None:
    codes, scales = float8(17, 64, 2)
    for bad in ((codes.float(), scales), (codes, scales.double())):
        with pytest.raises(ValueError, match="they are float8_e4m3fn and float32"):
            pack_float8(*bad)
    for bad_scales in (torch.ones(17, 3), torch.ones(16, 2), torch.ones(17, 0)):
        with pytest.raises(ValueError, match="do not divide codes"):
            pack_float8(codes, bad_scales)
    weight, x = pack_float8(codes, scales), torch.zeros(3, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="of float8 by floats or float8"):
        matmul(QuantizedActivations(x, torch.ones(3, 1), torch.float32), weight)
    with pytest.raises(ValueError, match="of float8 by floats or float8"):
        matmul(
            QuantizedActivations(x.to(torch.float8_e4m3fn), torch.ones(3, 1), torch.float32),
            pack_codes(x, torch.ones(3, 1), None, 8),
        )
    with pytest.raises(ValueError, match=r"scales \[3, 4\] for 3 rows"):
        matmul(QuantizedActivations(x.to(torch.float8_e4m3fn), torch.ones(3, 4), torch.float32, 16), weight)
    with pytest.raises(ValueError, match="cannot be"):
        Float8Weight(weight.memory[1:], 17, 64, 32)
    with pytest.raises(ValueError, match="cannot be"):
        Float8Weight(weight.memory, 17, 64, 24)


@any_way
def test_float32_contract() -> None:
    """8-bit weights only: within 1e-4 of the reference (measured: 2.6e-5)."""
    codes, scales, _, group = make(100, 4096, 8, 0, False)
    x = randn(9, 4096)
    expected = reference.int_matmul(x, codes, scales, None, group)
    error = (matmul(x, pack_codes(codes, scales, None, 8)) - expected).norm() / expected.norm()
    assert error < 1e-4


@any_way
@each("group", [0, 128])
def test_an_outlier_costs_less_than_rounding_to_bfloat16(group: int) -> None:
    """One channel is 1000 times larger: its block of 128 channels loses bits of fixed point, the other blocks do
    not."""
    codes, scales, _, size = make(100, 4096, 8, group, False)
    x = randn(9, 4096)
    x[:, 77] *= 1000
    expected = reference.int_matmul(x, codes, scales, None, size)
    error = (matmul(x, pack_codes(codes, scales, None, 8)) - expected).norm()
    rounded = (reference.int_matmul(x.bfloat16(), codes, scales, None, size) - expected).norm()
    assert error < rounded / 4


@any_way
def test_not_finite_rows_are_seen_and_do_not_touch_others() -> None:
    packed, x = pack_codes(*make(17, 127, 8, 0, False)[:3], 8), randn(4, 127)
    before = matmul(x, packed)
    x[1, 3], x[2, 100] = torch.nan, torch.inf
    result = matmul(x, packed)
    assert torch.equal(result[[0, 3]], before[[0, 3]])
    assert not result[1:3].isfinite().any()
    codes, scales = quantize_rows(x)
    int8 = matmul(QuantizedActivations(codes, scales, torch.float32), packed)
    assert int8[[0, 3]].isfinite().all()
    assert int8[1:3].isnan().all()


@any_way
def test_no_rows_and_tiny_numbers() -> None:
    packed = pack_codes(*make(17, 64, 4, 32, True)[:3], 4)
    assert matmul(torch.zeros(0, 64), packed).shape == (0, 17)
    assert matmul(
        QuantizedActivations(torch.zeros(0, 64, dtype=torch.int8), torch.zeros(0, 1), torch.bfloat16), packed
    ).shape == (
        0,
        17,
    )
    assert matmul(torch.full((1, 64), 1e-40), packed).abs().max() < 1e-35
    # Intermediate sums overflow in torch, to both sides, in its own order.
    assert build.library() is None or matmul(torch.full((1, 64), 1e38), packed).isnan().sum() == 0


@any_way
def test_the_largest_sums_do_not_overflow() -> None:
    num_inputs = 2**17 - 1
    codes = torch.full((2, num_inputs), -128, dtype=torch.int8)
    packed = pack_codes(codes, torch.ones(2, 1), None, 8)
    result = matmul(QuantizedActivations(codes[:1], torch.ones(1, 1), torch.float32), packed)
    assert result.tolist() == [[float(num_inputs * 2**14)] * 2]
    assert matmul(torch.full((1, num_inputs), -3.0), packed).tolist() == [
        [pytest.approx(384.0 * num_inputs, rel=2**-15)] * 2
    ]


def test_codes_and_scales_that_cannot_be_packed_are_refused() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="5 groups of 64 inputs: a group has 32, 64 or 128 inputs, or all of them"):
        pack_codes(codes, torch.ones(4, 5), None, 8)
    with pytest.raises(ValueError, match="3 bits without zero points: only 4 and 8, and zero points with 4"):
        pack_codes(codes, scales, None, 3)
    with pytest.raises(ValueError, match="8 bits with zero points"):
        pack_codes(codes, scales, torch.zeros(4, 2, dtype=torch.int8), 8)
    with pytest.raises(ValueError, match="codes of 4 bits from 0 to 9: they go from -8 to 7"):
        pack_codes(codes.index_fill(0, torch.tensor([1]), 9), scales, None, 4)
    with pytest.raises(ValueError, match="codes and zero points are int8, scales float32"):
        pack_codes(codes, scales.double(), None, 8)
    with pytest.raises(ValueError, match=r"scales \[3, 2\] and their zero points do not belong to codes \[4, 64\]"):
        pack_codes(codes, scales[:3], None, 8)
    with pytest.raises(ValueError, match="131072 inputs: a kernel adds 1 to 131071"):
        pack_codes(torch.zeros(1, 2**17, dtype=torch.int8), torch.ones(1, 1), None, 8)
    with pytest.raises(ValueError, match="a zero point of -113: from -112 on, a code minus it fits 8 bits"):
        pack_codes(codes, scales, torch.full((4, 2), -113, dtype=torch.int8), 4)
    packed = pack_codes(codes, scales, None, 8)
    with pytest.raises(ValueError, match="a packed weight of 1152 bytes cannot be"):
        IntWeight(packed.memory[:-1], 4, 64, 32, 8, False)
    for size in (0, 1, 16, 256):  # a graph may contain them
        with pytest.raises(
            ValueError, match=f"64 inputs in groups of {size}: a kernel adds 1 to 131071, in groups of 32"
        ):
            IntWeight(packed.memory, 4, 64, size, 8, False)
    with pytest.raises(ValueError, match="5 bits without zero points: only 4 and 8"):
        IntWeight(packed.memory, 4, 64, 32, 5, False)
    with pytest.raises(ValueError, match=r"rows \[2, 63\] cannot be multiplied by a weight of 64 inputs"):
        matmul(torch.zeros(2, 63), packed)

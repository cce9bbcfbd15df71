import math
import re

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from kernels.linear.block_weight import FP4_VALUES
from quantization import fp4
from quantization.codes import CodeKind
from quantization.weight_format import QuantizedWeight, WeightFormat, choose_scales, encode, of_blocks, quantize
from tests.helpers.cases import each
from tests.helpers.random_tensors import random

INT4 = WeightFormat(bits=4, group_size=8)
ASYMMETRIC = WeightFormat(bits=4, symmetric=False, group_size=8)
FP8 = WeightFormat(kind=CodeKind.FP8)
FP4 = [of_blocks("MXFP4"), of_blocks("NVFP4")]
FORMATS = [
    INT4,
    ASYMMETRIC,
    FP8,
    WeightFormat(),
    WeightFormat(bits=4),
    WeightFormat(bits=4, symmetric=False),
    WeightFormat(per_tensor=True),
    WeightFormat(bits=4, per_tensor=True),
    WeightFormat(kind=CodeKind.FP8, per_tensor=True),
    WeightFormat(bits=4, group_size=8, scale_dtype=torch.float16),
    WeightFormat(bits=4, symmetric=False, group_size=8, scale_dtype=torch.bfloat16),
]


def symmetric_by_hand(row: list[float], highest: int) -> tuple[list[int], float]:
    extreme = max(row, key=abs)
    if highest == 127:
        return coded(row, abs(extreme) / 127, highest)
    return min((coded(row, extreme / steps, highest) for steps in (7, -8)), key=lambda done: squared_error(row, *done))


def coded(row: list[float], scale: float, highest: int) -> tuple[list[int], float]:
    codes = [round(value / scale) for value in row]  # Python's round is half to even
    return [min(highest, max(-highest - 1, code)) for code in codes], scale


def squared_error(row: list[float], codes: list[int], scale: float) -> float:
    return sum((value - code * scale) ** 2 for value, code in zip(row, codes, strict=True))


def asymmetric_by_hand(row: list[float]) -> tuple[list[int], float, int]:
    extreme = max(row, key=abs)
    found = []
    for steps in range(15, 6, -1):  # between the extreme's code, 0 or 15, and the zero point
        scale, zero = abs(extreme) / steps, steps if extreme < 0 else 15 - steps
        found.append(([min(15, max(0, round(value / scale) + zero)) for value in row], scale, zero))
    return min(found, key=lambda done: squared_error(row, [code - done[2] for code in done[0]], done[1]))


@each(("bits", "size"), [(4, 8), (8, 8), (4, None), (8, None)])
@each("num_outputs", [1, 5])
def test_symmetric_is_the_formula(bits: int, size: int | None, num_outputs: int) -> None:
    weight = random(num_outputs, 24)
    done = quantize(weight, WeightFormat(bits=bits, group_size=size))
    assert done.zero_points is None
    assert done.permutation is None
    assert done.codes.dtype == torch.int8
    for i, row in enumerate(weight.double().unflatten(1, (-1, size or 24))):
        for g, group in enumerate(row):
            codes, scale = symmetric_by_hand(group.tolist(), 2 ** (bits - 1) - 1)
            assert done.codes[i].unflatten(0, (-1, size or 24))[g].tolist() == codes
            assert done.scales[i, g].item() == pytest.approx(scale, rel=1e-6)  # float32 has 2**-24 = 6e-8 per rounding


def test_asymmetric_is_the_formula() -> None:
    weight = random(3, 24)
    weight[0, :8] = weight[0, :8].abs() + 1  # 0 is outside the group's own range
    done = quantize(weight, ASYMMETRIC)
    assert done.zero_points is not None
    for i, row in enumerate(weight.double().unflatten(1, (-1, 8))):
        for g, group in enumerate(row):
            codes, scale, zero = asymmetric_by_hand(group.tolist())
            assert done.codes[i].unflatten(0, (-1, 8))[g].tolist() == codes
            assert (done.zero_points[i, g].item(), done.scales[i, g].item()) == (zero, pytest.approx(scale, rel=1e-6))


def test_fp8_keeps_what_lies_between_whole_numbers() -> None:
    done = quantize(torch.tensor([[448.0, 0.875, -1.125, 2.3, 0.001953125]]), FP8)
    assert done.scales.tolist() == [[1.0]]
    assert done.codes.dtype == torch.float8_e4m3fn
    assert done.dequantize().tolist() == [
        [448.0, 0.875, -1.125, 2.25, 0.001953125]
    ]  # 2.3: steps of 1/4; the last is 2**-9, the smallest


@each("size", [8, None])
def test_symmetric_4_bit_codes_use_all_sixteen(size: int | None) -> None:
    weight = random(200, 40)
    done = quantize(weight, WeightFormat(bits=4, group_size=size))
    assert set(done.codes.unique().tolist()) == set(range(-8, 8))
    groups = weight.unflatten(1, (-1, size or 40))
    scales = groups.abs().amax(2, keepdim=True) / 7
    seven = (groups / scales).round() * scales
    # 15 codes with the same groups: for normal weights, 16 codes and a chosen scale reduce the squared error by a tenth
    # or more
    assert float((done.dequantize() - weight).square().sum()) < 0.9 * float((seven - groups).square().sum())


def test_the_best_scale_of_a_whole_weight_is_one() -> None:
    weight = random(7, 40)
    done = quantize(weight, WeightFormat(bits=4, per_tensor=True))
    codes, scale = symmetric_by_hand(weight.double().flatten().tolist(), 7)
    assert done.codes.flatten().tolist() == codes
    assert done.scales.tolist() == [[pytest.approx(scale, rel=1e-6)]]  # float32 has 2**-24 = 6e-8 per rounding


def test_the_extremes_choose_their_scale() -> None:
    """Values on the grid are kept: groups from -8 to 7 steps, from -7 to 8, from -7 to 7, and zeros."""
    row = [7.0, 3, 1, -5, 2, 4, -1]
    weight = torch.tensor([[-8.0, *row], [8, *(-step for step in row)], [-7, *row], [0] * 8]) * 0.25
    done = quantize(weight, INT4)
    assert done.scales.tolist() == [[0.25], [-0.25], [0.25], [1.0]]
    assert done.dequantize().equal(weight)
    shifted = quantize(weight + 0.75, ASYMMETRIC)  # -5 to 10, -4 to 11, -4 to 10, and 3 steps
    assert shifted.dequantize().equal(weight + 0.75)


@each("format", FORMATS)
def test_half_a_step_is_the_largest_error(format: WeightFormat) -> None:
    weight = random(7, 40)
    done = quantize(weight, format)
    error = (done.dequantize() - weight).abs().unflatten(1, (done.scales.shape[1], -1))
    if format.kind is CodeKind.FP8:
        step = (
            weight.abs().unflatten(1, (done.scales.shape[1], -1)) / 8 + done.scales.unsqueeze(2) / 512
        )  # 3 bits of mantissa; subnormals
    else:
        step = done.scales.abs().unsqueeze(2).expand_as(error)
    slack: Tensor | float = (
        1.3 if format.scale_dtype == torch.bfloat16 else 1.01
    )  # rounded down by 2**-9, it misses the largest by 15 * 2**-9
    if format.bits == 4:  # numbers on the other side of 0 than the extreme may saturate by another half a step
        is_last = torch.isin(done.codes, torch.tensor(format.code_range))
        slack *= torch.where(is_last, 2, 1).unflatten(1, (done.scales.shape[1], -1))
    assert bool((error <= step / 2 * slack).all())
    assert torch.equal(done.scales, done.scales.to(format.scale_dtype).float())


@each("format", FORMATS)
def test_numbers_on_the_grid_are_encoded_exactly(format: WeightFormat) -> None:
    once = quantize(random(7, 40), format)
    again = encode(once.dequantize(), once.scales, once.zero_points, format)
    assert torch.equal(again.float(), once.codes.float())


@each("format", FORMATS)
@each("value", [0.0, 1e-45, 3e38])
def test_extreme_rows_stay_finite(format: WeightFormat, value: float) -> None:
    weight = random(4, 16)
    weight[1] = value
    weight[1, ::2] *= -1
    done = quantize(weight, format)
    assert bool(done.scales.isfinite().all())
    assert bool(done.dequantize().isfinite().all())
    if not format.per_tensor and value < 1:
        assert not bool(done.dequantize()[1].abs().gt(1e-30).any())


@each("format", FP4)
@each("dtype", [torch.float32, torch.bfloat16])
def test_fp4_has_the_best_of_a_few_scales(format: WeightFormat, dtype: torch.dtype) -> None:
    weight = (random(5, 128) * torch.linspace(0.01, 4, 128)).to(dtype)
    weight[3, :64] = 0
    done = quantize(weight, format)
    divisor = float(torch.tensor(2688) / weight.float().abs().max())  # a float32
    assert done.global_scale == (1 / divisor if format.kind is CodeKind.NVFP4 else 1)
    groups = weight.float().unflatten(1, (-1, format.group_size or 0))
    for group, values in zip(groups.flatten(0, 1), done.dequantize().view_as(groups).flatten(0, 1), strict=True):
        candidates = [nearest_fp4(group, scale) for scale in fp4_scales(float(group.abs().max()), divisor, format)]
        least = min((candidate - group).square().sum() for candidate in candidates)
        assert (values - group).square().sum() <= least * (1 + 1e-6)  # sums in another order
    for value in (0.0, 1e-45, 3e38):
        assert quantize(torch.full((4, 64), value), format).dequantize().isfinite().all()


def fp4_scales(largest: float, divisor: float, format: WeightFormat) -> list[float]:
    if format.kind is CodeKind.MXFP4:
        exponent = math.floor(math.log2(largest)) - 2 if largest else 0
        return [2.0**exponent, 2.0 ** (exponent + 1)]
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    first = int((every - largest / 6 * divisor).abs().argmin())
    chosen = [min(max(first + step, 0), len(every) - 1) for step in (0, -1, 1, 4, 5)]
    return (every[chosen] / divisor).tolist()


def nearest_fp4(group: Tensor, scale: float) -> Tensor:
    distances = (group[:, None].double() / scale - FP4_VALUES).abs()
    return FP4_VALUES[distances.argmin(1)] * scale


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6.5, -0.75, -9])
    assert fp4._rounded(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1, -6]
    row = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0]])
    assert encode(row, torch.ones(1, 1), None, INT4).tolist() == [[7, 0, 2, 2, 0, -2, -2, 0]]


def test_encode_saturates_at_the_lowest_code() -> None:
    assert encode(torch.tensor([[-99.0, 99.0]]), torch.ones(1, 1), None, WeightFormat(bits=4)).tolist() == [[-8, 7]]


def test_columns_that_were_permuted_return_to_their_places() -> None:
    weight, order = random(3, 16), torch.randperm(16, generator=torch.Generator().manual_seed(1))
    done = quantize(weight[:, order], INT4)
    stored = QuantizedWeight(done.codes, done.scales, permutation=order)
    x = random(5, 16, seed=2)
    assert torch.equal(stored.dequantize()[:, order], done.dequantize())
    # the same products in another order: 16 float32 sums
    torch.testing.assert_close(x @ stored.dequantize().T, x[:, order] @ done.dequantize().T, rtol=1e-5, atol=1e-5)


def test_scales_that_float16_holds_as_subnormals_still_count() -> None:
    weight = random(3, 16) * 1e-4
    done = quantize(weight, WeightFormat(scale_dtype=torch.float16))
    assert bool((done.scales < torch.finfo(torch.float16).tiny).all())
    # half a step, and the largest value's loss by a scale rounded down by half of 2**-24: 127 / 2 of that
    assert bool(((done.dequantize() - weight).abs() <= done.scales / 2 + 127 / 2 * 2**-24).all())


def test_a_low_precision_weight_is_its_float32_value() -> None:
    weight = random(3, 16).bfloat16()
    assert torch.equal(quantize(weight, INT4).dequantize(), quantize(weight.float(), INT4).dequantize())


@each("format", [INT4, *FP4])
@each("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_numbers_are_refused(format: WeightFormat, bad: float) -> None:
    weight = random(4, 64)
    weight[2, 5] = bad
    with pytest.raises(UserError, match="1 of 256 weights are NaN or infinite"):
        quantize(weight, format)


def test_groups_that_do_not_divide_are_refused() -> None:
    message = "groups of 8 do not divide the 20 input channels of a weight [3, 20]: give a group_size that does"
    with pytest.raises(UserError, match=re.escape(message)):
        choose_scales(random(3, 20), INT4)


@each(
    ("options", "message"),
    [
        ({"bits": 3}, "bits=3 is not allowed: give 8, or 4 for int codes"),
        ({"bits": 4, "kind": CodeKind.FP8}, "bits=4 is not allowed"),
        ({"symmetric": False}, "symmetric=False is not allowed: give true, or bits=4"),
        ({"group_size": 0}, "group_size=0 is not allowed: give a positive number, or null"),
        ({"group_size": 8, "per_tensor": True}, "group_size=8 is not allowed: give null where scales are per tensor"),
    ],
)
def test_formats_that_contradict_themselves_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        WeightFormat(**options)  # type: ignore[arg-type]


@each("num_numbers", [1, 200, 192 * 7])
@each(
    "format",
    [
        WeightFormat(8),
        WeightFormat(4, group_size=24),
        WeightFormat(4, per_tensor=True),
        WeightFormat(4, symmetric=False, group_size=24),
        WeightFormat(8, CodeKind.FP8, per_tensor=True),
        *FP4,
    ],
)
def test_blocks_of_rows_change_nothing(format: WeightFormat, num_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(40, 192).bfloat16()
    expected = quantize(weight, format)
    monkeypatch.setattr("quantization.weight_format.BLOCK", num_numbers)
    blocks = quantize(weight, format)
    assert blocks.codes.view(torch.int8).equal(expected.codes.view(torch.int8))
    assert blocks.scales.equal(expected.scales)
    assert (blocks.zero_points is None) == (expected.zero_points is None)
    assert expected.zero_points is None or expected.zero_points.equal(blocks.zero_points)  # type: ignore[arg-type]

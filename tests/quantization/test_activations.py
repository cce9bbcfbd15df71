import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from quantization.activations import (
    HIGHEST,
    ActivationRange,
    best_static_scale,
    quantize_per_token,
    quantize_static,
    static_scale,
)
from quantization.codes import CodeKind
from tests.helpers.cases import each
from tests.helpers.random_tensors import random


def test_a_range_is_that_of_all_chunks() -> None:
    x = random(101, 7)
    seen = ActivationRange(7)
    for chunk in x.split([1, 0, 60, 40]):
        seen.add(chunk)
    minimum, maximum = seen.bounds()
    assert minimum.tolist() == [min(channel) for channel in x.T.tolist()]
    assert maximum.tolist() == [max(channel) for channel in x.T.tolist()]


@each(
    ("chunk", "message"),
    [
        (torch.zeros(0, 3), "no activations reached this layer: give more calibration data"),
        (torch.tensor([[0.0, float("nan"), 1.0]]), "activations are NaN or infinite: calibrate in float32 or bfloat16"),
        (
            torch.tensor([[0.0, float("-inf"), 1.0]]),
            "activations are NaN or infinite: calibrate in float32 or bfloat16",
        ),
    ],
)
def test_a_range_of_nothing_or_of_no_numbers_is_refused(chunk: Tensor, message: str) -> None:
    seen = ActivationRange(3)
    seen.add(chunk)
    seen.add(chunk)
    with pytest.raises(UserError, match=message):
        seen.bounds()


def test_int8_per_token_is_the_formula() -> None:
    x = random(5, 31)
    codes, scales = quantize_per_token(x, CodeKind.INT)
    assert codes.dtype == torch.int8
    for row, code, scale in zip(x.tolist(), codes.tolist(), scales.tolist(), strict=True):
        expected = max(map(abs, row)) / 127
        assert scale == [pytest.approx(expected, rel=1e-6)]  # one float32 rounding
        assert code == [round(value / expected) for value in row]


@each("kind", list(HIGHEST))
@each("num_tokens", [1, 63])
def test_a_static_scale_of_one_token_is_its_own(kind: CodeKind, num_tokens: int) -> None:
    x = random(num_tokens, 16)
    codes, scales = quantize_per_token(x, kind)
    for i in range(num_tokens):
        scale = static_scale(x[i].abs(), kind)
        assert scale == scales[i]
        assert torch.equal(quantize_static(x[i], scale, kind).float(), codes[i].float())


def test_a_static_int8_scale_has_the_least_error_of_eight() -> None:
    x = random(63, 16)
    x[5, 3] = 12  # one value in a thousand, four times as large as the next
    candidates = [12 / 127 * share / 10 for share in range(10, 2, -1)]
    errors = [
        sum((max(-128, min(127, round(value / scale))) * scale - value) ** 2 for value in x.flatten().tolist())
        for scale in candidates
    ]
    best_scale = float(best_static_scale(x.abs().amax(0), x, CodeKind.INT))
    assert best_scale == pytest.approx(candidates[errors.index(min(errors))], rel=1e-6)  # one float32 rounding
    assert best_static_scale(x.abs().amax(0), x, CodeKind.FP8) == static_scale(x.abs().amax(0), CodeKind.FP8)


def test_a_static_int8_scale_lets_rare_values_saturate() -> None:
    """The value saturates unless it matters more than the steps of all other values."""
    x = random(4000, 16)
    full_scale = static_scale(x.abs().amax(0), CodeKind.INT)
    assert best_static_scale(x.abs().amax(0), x, CodeKind.INT) < full_scale
    x[:, 3] = 500
    assert best_static_scale(x.abs().amax(0), x, CodeKind.INT) == static_scale(x.abs().amax(0), CodeKind.INT)


def test_fp8_rounds_to_its_own_steps_and_not_to_whole_numbers() -> None:
    x = torch.tensor([[448.0, 0.30, -1.2, 17.0, 0.001]])
    codes, scales = quantize_per_token(x, CodeKind.FP8)
    assert scales.tolist() == [[1.0]]
    # steps: 2**-5 from 0.25, 2**-3 from 1, 2 from 16, where the tie goes to the even mantissa, and 2**-9 below 2**-6
    assert codes.float().tolist() == [[448.0, 0.3125, -1.25, 16.0, 0.001953125]]


@each(("kind", "codes"), [(CodeKind.INT, [127, -128, 0]), (CodeKind.FP8, [448.0, -448.0, 0.0])])
def test_numbers_outside_a_static_range_saturate(kind: CodeKind, codes: list[float]) -> None:
    assert quantize_static(torch.tensor([1e30, -1e30, 0.0]), torch.tensor(0.5), kind).float().tolist() == codes


@each("kind", list(HIGHEST))
def test_silent_tokens_have_codes_of_zero_and_a_finite_scale(kind: CodeKind) -> None:
    codes, scales = quantize_per_token(torch.zeros(2, 5), kind)
    assert scales.tolist() == [[1.0], [1.0]]
    assert not codes.float().any()
    assert static_scale(torch.zeros(5), kind) == 1


def test_low_precision_is_quantised_as_its_float32_value() -> None:
    x = random(3, 16).bfloat16()
    for kind in HIGHEST:
        low, wide = quantize_per_token(x, kind), quantize_per_token(x.float(), kind)
        assert torch.equal(low[0].float(), wide[0].float())
        assert torch.equal(low[1], wide[1])

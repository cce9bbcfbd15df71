import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quantization import fold
from tests.helpers.cases import each
from tests.helpers.random_tensors import random

OUTLIERS = 100.0


def outliers(num_channels: int) -> Tensor:
    """Return scales, three of which are 100 times larger."""
    scales = random(num_channels, seed=9).abs() + 0.5
    scales[[1, 5, 11]] *= OUTLIERS
    return scales


def assert_same(folded: Tensor, original: Tensor) -> None:
    assert (
        (folded - original).abs().max() / original.abs().max()
    ).item() < 1e-4  # the guarantee: 1e-4 of float32 outputs


@each("offset", [0.0, 1.0])
@each("bias", [False, True])
def test_a_norm_takes_scales_from_its_linears(bias: bool, offset: float) -> None:
    x, norm, norm_bias = random(63, 17), random(17, seed=1) * outliers(17), random(17, seed=2) if bias else None
    linears, scales = [random(9, 17, seed=3), random(5, 17, seed=4)], outliers(17)

    def outputs(norm: Tensor, norm_bias: Tensor | None, linears: list[Tensor]) -> Tensor:
        y = functional.layer_norm(x, (17,)) * (offset + norm) + (0 if norm_bias is None else norm_bias)
        return torch.cat([y @ weight.T for weight in linears], 1)

    folded_norm, folded_bias = fold.divide_norm(norm, norm_bias, scales, offset)
    folded = outputs(folded_norm, folded_bias, [fold.multiply_inputs(weight, scales) for weight in linears])
    assert (folded_bias is not None) == bias
    assert_same(folded, outputs(norm, norm_bias, linears))


@each("bias", [False, True])
def test_a_linear_takes_scales_from_the_next(bias: bool) -> None:
    x, first, first_bias, second = (
        random(63, 13),
        random(17, 13, seed=1),
        random(17, seed=2) if bias else None,
        random(5, 17, seed=3),
    )
    scales = outliers(17)
    divided, divided_bias = fold.divide_outputs(first, first_bias, scales)
    folded = functional.linear(functional.linear(x, divided, divided_bias), fold.multiply_inputs(second, scales))
    assert_same(folded, functional.linear(functional.linear(x, first, first_bias), second))


@each("biases", [False, True])
def test_a_norm_is_centred_and_then_scaled(biases: bool) -> None:
    x, norm, weight = random(63, 17), outliers(17), random(9, 17, seed=1)
    norm_bias, bias = (random(17, seed=2) * OUTLIERS, random(9, seed=3)) if biases else (None, None)
    before = functional.layer_norm(x, (17,), norm, norm_bias)
    shift = fold.midpoint(before.amin(0), before.amax(0))
    centred_bias, added = fold.shift_norm(norm_bias, shift), fold.shift_inputs(weight, bias, shift)
    centred = functional.layer_norm(x, (17,), norm, centred_bias)
    # sums of floats up to 300: a few times 2**-24 of that
    torch.testing.assert_close(centred.amax(0), -centred.amin(0), rtol=1e-5, atol=1e-3)
    assert_same(functional.linear(centred, weight, added), functional.linear(before, weight, bias))
    scaled, scaled_bias = fold.divide_norm(norm, centred_bias, outliers(17))
    folded = functional.linear(
        functional.layer_norm(x, (17,), scaled, scaled_bias), fold.multiply_inputs(weight, outliers(17)), added
    )
    assert_same(folded, functional.linear(before, weight, bias))


def test_results_have_the_dtype_of_what_they_replace() -> None:
    weight, bias, scales = random(3, 3).bfloat16(), random(3).bfloat16(), outliers(12)[:3]
    results = [
        *fold.divide_norm(bias, bias, scales),
        *fold.divide_outputs(weight, bias, scales),
        fold.multiply_inputs(weight, scales),
    ]
    results += [
        fold.shift_norm(bias, scales),
        fold.shift_inputs(weight, bias, scales),
        fold.shift_inputs(weight, None, scales),
    ]
    assert all(result is not None and result.dtype == torch.bfloat16 for result in results)


def test_the_midpoint_of_huge_bounds_is_finite() -> None:
    assert fold.midpoint(torch.tensor([-1.0, 1e38]), torch.tensor([3.0, 3e38])).tolist() == pytest.approx([1.0, 2e38])

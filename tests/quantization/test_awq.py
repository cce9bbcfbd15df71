import re

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from quantization.awq import search_clip, search_scales
from quantization.weight_format import WeightFormat, quantize
from tests.helpers.cases import each
from tests.helpers.random_tensors import random, with_outliers

INT4 = WeightFormat(bits=4, group_size=16)
FORMATS = [INT4, WeightFormat(bits=4, symmetric=False, group_size=16), WeightFormat(bits=4), WeightFormat()]


def scaled_error(weights: list[Tensor], x: Tensor, scales: Tensor, format: WeightFormat) -> float:
    """Return AWQ's objective in float64: the error of scaled inputs times the codes of scaled weights."""
    error = 0.0
    for weight in weights:
        outputs = (x.double() / scales.double()) @ quantize(weight * scales, format).dequantize().double().T
        error += float((x.double() @ weight.double().T - outputs).square().sum())
    return error


@each("format", FORMATS)
def test_the_scales_are_the_best_of_the_grid(format: WeightFormat) -> None:
    weights, x = [random(9, 48), random(1, 48, seed=2)], with_outliers(63, 48)
    found = search_scales(weights, x, format)
    candidates = []
    for step in range(20):
        scales = x.abs().mean(0) ** (step / 20)
        candidates.append(scales / (scales.max() * scales.min()).sqrt())
    errors = [scaled_error(weights, x, scales, format) for scales in candidates]
    # float32 compared with float64: the chosen candidate may be another one with an equally small error
    assert scaled_error(weights, x, found, format) <= min(errors) * (1 + 1e-4)
    assert min(errors) <= errors[0]
    assert any(torch.allclose(found, scales, rtol=1e-5) for scales in candidates)
    taken = torch.cat(weights).repeat_interleave(250, 0)  # every third output is searched: 834 of 2,500
    assert torch.equal(search_scales([taken], x, format), search_scales([taken[::3]], x, format))


def test_outliers_are_worth_a_scale() -> None:
    weights, x = [random(9, 48)], with_outliers(63, 48)
    assert scaled_error(weights, x, search_scales(weights, x, INT4), INT4) < 0.3 * scaled_error(
        weights, x, torch.ones(48), INT4
    )


def test_silent_channels_have_finite_scales() -> None:
    weights, x = [random(9, 48)], with_outliers(63, 48)
    x[:, ::2] = 0
    scales = search_scales(weights, x, INT4)
    assert bool((scales.isfinite() & (scales > 0)).all())
    assert torch.equal(search_scales(weights, torch.zeros(5, 48), INT4), torch.ones(48))


@each("format", FORMATS)
def test_the_clip_of_each_group_is_the_best_of_the_grid(format: WeightFormat) -> None:
    weight, x = random(5, 48), with_outliers(63, 48)
    size = format.group_size or 48
    clipped = search_clip(weight, x, format)
    for row in range(5):
        for start in range(0, 48, size):
            part, inputs = weight[row : row + 1, start : start + size], x[:, start : start + size].double()
            candidates, errors = [], []
            for step in range(10):
                limit = float(part.abs().max()) * (1 - step / 20)
                candidates.append(part.clamp(-limit, limit))
                rounded = quantize(
                    candidates[-1], WeightFormat(bits=format.bits, symmetric=format.symmetric)
                ).dequantize()
                errors.append(float((inputs @ (part - rounded).double().T).square().sum()))
            best = candidates[errors.index(min(errors))]
            # the limit is float32 here and float64 there
            torch.testing.assert_close(clipped[row : row + 1, start : start + size], best, rtol=1e-6, atol=0)


@each("format", FORMATS)
def test_a_clipped_weight_is_never_worse_in_its_groups(format: WeightFormat) -> None:
    weight, x = random(9, 48), with_outliers(63, 48)
    weight[:, 5] *= 6
    clipped, size = search_clip(weight, x, format), format.group_size or 48

    def errors(quantized: Tensor) -> Tensor:
        return torch.stack(
            [(x[:, g : g + size] @ (weight - quantized)[:, g : g + size].T).square().sum(0) for g in range(0, 48, size)]
        )

    before, after = errors(quantize(weight, format).dequantize()), errors(quantize(clipped, format).dequantize())
    assert bool((after <= before * (1 + 1e-5)).all())  # float32 sums of 63 * 48 terms
    assert float(after.sum()) < float(before.sum()) or format.bits == 8


def test_rows_of_zeros_stay_and_the_search_is_deterministic() -> None:
    weight, x = random(3, 48), with_outliers(63, 48)
    weight[1] = 0
    once, again = search_clip(weight, x, INT4), search_clip(weight, x, INT4)
    assert torch.equal(once, again)
    assert not once[1].any()
    assert torch.equal(search_scales([weight], x, INT4), search_scales([weight], x, INT4))


def test_bad_input_is_refused() -> None:
    weight, x = random(3, 48), with_outliers(5, 48)
    with pytest.raises(
        UserError, match=re.escape("auto_clip=True is not allowed: give false where scales are per tensor")
    ):
        search_clip(weight, x, WeightFormat(per_tensor=True))
    for search in (lambda w, x: search_clip(w, x, INT4), lambda w, x: search_scales([w], x, INT4)):
        with pytest.raises(UserError, match="no activations reached this layer"):
            search(weight, x[:0])
        with pytest.raises(UserError, match="activations are NaN or infinite"):
            search(weight, x / 0)
        with pytest.raises(UserError, match="groups of 16 do not divide the 40 input channels"):
            search(weight[:, :40], x[:, :40])
        with pytest.raises(UserError, match="1 of 144 weights are NaN or infinite"):
            search(weight.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(float("nan"))), x)

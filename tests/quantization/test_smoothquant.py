import math
import re

import pytest
import torch

from conf.errors import UserError
from quantization.smoothquant import group_channels, int8_output_error, search_smooth_scales, smooth_scales
from tests.helpers.cases import each
from tests.helpers.random_tensors import random, with_outliers

WEIGHTS = [random(9, 48), 3 * random(1, 48, seed=5)]


def test_scales_are_the_formula() -> None:
    x = random(7, 48, seed=3)
    scales = smooth_scales(x, WEIGHTS, 0.7)
    for channel in range(48):
        column = [value for weight in WEIGHTS for value in weight[:, channel].tolist()]
        rms, weight_rms = (
            math.sqrt(sum(value**2 for value in values) / len(values)) for values in (x[:, channel].tolist(), column)
        )
        expected = rms**0.7 / weight_rms**0.3
        assert scales[channel].item() == pytest.approx(expected, rel=1e-5)  # two float32 powers


def test_channels_of_zeros_are_left_alone() -> None:
    x, weight = random(7, 48, seed=3), random(9, 48)
    x[:, 3], weight[:, 5] = 0, 0
    scales = smooth_scales(x, [weight])
    assert scales[[3, 5]].tolist() == [1, 1]
    assert bool((scales.isfinite() & (scales > 0)).all())


def test_the_error_is_that_of_int8_products() -> None:
    x, scales = with_outliers(21, 48), random(48, seed=4).abs() + 0.1
    smooth = (x / scales).double()
    scale = smooth.abs().max() / 127
    expected = 0.0
    for weight in WEIGHTS:
        wide = (weight * scales).double()
        per_row = wide.abs().amax(1, keepdim=True) / 127
        integers = (smooth / scale).round() @ (wide / per_row).round().T
        expected += float((x.double() @ weight.double().T - integers * scale * per_row.T).square().sum())
    # the error is a difference of float32 outputs some 100 times as large
    assert int8_output_error(x, WEIGHTS, scales) == pytest.approx(expected, rel=1e-3)


def test_smoothing_saves_what_outliers_destroy() -> None:
    x = with_outliers(63, 48)
    plain = int8_output_error(x, WEIGHTS, torch.ones(48))
    smooth = int8_output_error(x, WEIGHTS, smooth_scales(x, WEIGHTS))
    assert smooth < plain / 10


@each("num_groups", [1, 3, 6])
def test_the_search_is_never_worse_than_alpha_one_half(num_groups: int) -> None:
    x = with_outliers(63, 48)
    scales = search_smooth_scales(x, WEIGHTS, num_groups)
    error = int8_output_error(x, WEIGHTS, scales)
    assert error < int8_output_error(x, WEIGHTS, smooth_scales(x, WEIGHTS))
    if num_groups == 1:
        errors = [int8_output_error(x, WEIGHTS, smooth_scales(x, WEIGHTS, step / 20)) for step in range(4, 17)]
        assert error == pytest.approx(
            min(errors), rel=1e-4
        )  # a power by a tensor may differ in its last bit, and change a code
    assert torch.equal(scales, search_smooth_scales(x, WEIGHTS, num_groups))


def test_groups_part_outliers_from_the_rest() -> None:
    absmax = random(200, seed=6).abs() + 1
    absmax[[7, 99]] = 300
    groups = group_channels(absmax, 3)
    assert (groups == groups[7]).nonzero().flatten().tolist() == [7, 99]
    for k in range(3):  # each group is an interval: no code of another group is inside it
        low, high = absmax[groups == k].min(), absmax[groups == k].max()
        assert bool(((groups == k) == ((absmax >= low) & (absmax <= high))).all())


def test_more_groups_than_channels_and_channels_that_are_equal() -> None:
    assert group_channels(torch.ones(4), 3).tolist() == [0, 0, 0, 0]
    assert len(group_channels(torch.tensor([1.0, 9.0]), 5).unique()) == 2
    scales = search_smooth_scales(random(5, 2), [random(3, 2)], 5)
    assert bool(scales.isfinite().all())


def test_bad_input_is_refused() -> None:
    x = with_outliers(5, 48)
    with pytest.raises(UserError, match=re.escape("num_groups=0 is not allowed: give a positive number")):
        search_smooth_scales(x, WEIGHTS, 0)
    with pytest.raises(UserError, match="no activations reached this layer"):
        search_smooth_scales(x[:0], WEIGHTS, 1)
    with pytest.raises(UserError, match="activations are NaN or infinite"):
        search_smooth_scales(x / 0, WEIGHTS, 1)
    with pytest.raises(UserError, match="9 of 432 weights are NaN or infinite"):
        search_smooth_scales(x, [WEIGHTS[0].index_fill(1, torch.tensor([2]), float("nan"))], 1)

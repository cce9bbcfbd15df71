import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from quantization.activations import sum_of_squares
from quantization.codes import CodeKind
from quantization.hessian import Hessian, inverse_factor
from quantization.weight_format import QuantizedWeight, WeightFormat, choose_scales, encode, quantize
from tests.helpers.cases import each
from tests.helpers.gptq import hessian_of, rounded_by_gptq
from tests.helpers.random_tensors import random

CHANNEL = WeightFormat(bits=4)
GROUPS = WeightFormat(bits=4, group_size=16)
ASYMMETRIC = WeightFormat(bits=4, symmetric=False, group_size=16)
FORMATS = [CHANNEL, GROUPS, ASYMMETRIC, WeightFormat(), WeightFormat(kind=CodeKind.FP8, per_tensor=True)]


def correlated(num_tokens: int, num_inputs: int, seed: int = 1) -> Tensor:
    """Return activations with few causes and some noise, whose channels differ in size, as in a language model."""
    causes = random(num_tokens, num_inputs // 4, seed=seed) @ random(num_inputs // 4, num_inputs, seed=seed + 1)
    return (causes + 0.3 * random(num_tokens, num_inputs, seed=seed + 2)) * random(num_inputs, seed=seed + 3).exp()


def rounded_to_nearest(weight: Tensor, format: WeightFormat) -> QuantizedWeight:
    """Return weight with the scales and zero points of GPTQ."""
    scales, zero_points = choose_scales(weight, format, fits_range=True)
    return QuantizedWeight(encode(weight, scales, zero_points, format), scales, zero_points)


def output_error(x: Tensor, weight: Tensor, done: QuantizedWeight) -> float:
    return float((x.double() @ (weight - done.dequantize()).double().T).square().sum())


def paper(
    weight: Tensor,
    hessian: Tensor,
    scale_at: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    highest: int,
    damping: float = 0.01,
    kept: Tensor | None = None,
) -> Tensor:
    """Compute GPTQ by equations 2 and 3 of the paper in float64: no blocks, no Cholesky; the inverse shrinks by a row
    each time.

    scale_at(i, rest [O, I - i]) gives the scales and the zero points [O] of channel i. Returns codes [O, I]. kept [O,
    I]: the other weights become 0 when their turn comes, as in SparseGPT.
    """
    rest, hessian = weight.double().clone(), hessian.double()
    inverse = torch.linalg.inv(
        hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    )
    codes = []
    lowest = 0 if highest == 15 else -highest - 1
    for i in range(weight.shape[1]):
        scale, zero = scale_at(i, rest)
        column = rest[:, 0] if kept is None else rest[:, 0] * kept[:, i]
        codes.append(((column / scale).round() + zero).clamp(lowest, highest))
        error = (rest[:, 0] - (codes[-1] - zero) * scale) / inverse[0, 0]
        rest = (rest - error[:, None] * inverse[0])[:, 1:]
        inverse = (inverse - inverse[:, :1] * inverse[:1] / inverse[0, 0])[1:, 1:]
    return torch.stack(codes, 1)


@each("act_order", [False, True])
@each(("format", "highest"), [(CHANNEL, 7), (WeightFormat(), 127), (GROUPS, 7), (ASYMMETRIC, 15)])
def test_static_scales_give_the_codes_of_the_paper(format: WeightFormat, highest: int, act_order: bool) -> None:
    weight, hessian = random(9, 144), hessian_of(correlated(400, 144))  # 144: a block of 128 and a rest
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(144)
    rounded = rounded_to_nearest(weight, format)
    group = torch.arange(144)[order] // (format.group_size or 144)
    scales = rounded.scales[:, group].double()
    zeros = torch.zeros(9, 144) if rounded.zero_points is None else rounded.zero_points[:, group]
    expected = paper(weight[:, order], hessian[order][:, order], lambda i, rest: (scales[:, i], zeros[:, i]), highest)
    done = rounded_by_gptq(weight, hessian, format, act_order=act_order)
    assert inverse_factor(hessian, 0.01, act_order).damping == 0.01
    assert done.permutation is None
    assert torch.equal(done.scales, rounded.scales)
    assert torch.equal(done.codes[:, order].double(), expected)


@each("act_order", [False, True])
@each(("format", "highest"), [(GROUPS, 7), (ASYMMETRIC, 15)])
def test_pruned_weights_stay_0_and_the_others_make_up_for_errors(
    format: WeightFormat, highest: int, act_order: bool
) -> None:
    weight, x = random(9, 144), correlated(400, 144)
    kept, hessian = random(9, 144, seed=5) > 0, hessian_of(x)
    weight = weight * kept
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(144)
    rounded = rounded_to_nearest(weight, format)
    group = torch.arange(144)[order] // 16
    scales = rounded.scales[:, group].double()
    zeros = torch.zeros(9, 144) if rounded.zero_points is None else rounded.zero_points[:, group]
    ordered = hessian[order][:, order]
    expected = paper(
        weight[:, order], ordered, lambda i, rest: (scales[:, i], zeros[:, i]), highest, kept=kept[:, order]
    )
    done = rounded_by_gptq(weight, hessian, format, act_order=act_order, kept=kept)
    assert torch.equal(done.codes[:, order].double(), expected)
    assert (done.dequantize()[~kept] == 0).all()
    assert output_error(x, weight, done) < output_error(x, weight, rounded)
    on_the_way = rounded_by_gptq(weight, hessian, format, act_order=act_order, static_groups=False, kept=kept)
    assert (on_the_way.dequantize()[~kept] == 0).all()
    assert output_error(x, weight, on_the_way) < output_error(x, weight, rounded)


@pytest.mark.long
@each("act_order", [False, True])
@each("size", [16, 48, 144, 160])  # blocks of 128 (8 groups), 96 (2 groups), one group each
def test_scales_chosen_on_the_way_give_the_codes_of_the_paper(size: int, act_order: bool) -> None:
    num_inputs = 480 if size == 160 else 288
    weight, hessian = random(5, num_inputs), hessian_of(correlated(600, num_inputs))
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(num_inputs)
    chosen: list[Tensor] = []

    def scale_at(i: int, rest: Tensor) -> tuple[Tensor, Tensor]:
        if i % size == 0:
            chosen.append(choose_scales(rest[:, :size].float(), CHANNEL)[0][:, 0].double())
        return chosen[-1], torch.zeros(5)

    expected = paper(weight[:, order], hessian[order][:, order], scale_at, 7)
    done = rounded_by_gptq(
        weight, hessian, WeightFormat(bits=4, group_size=size), act_order=act_order, static_groups=False
    )
    order, within = order.unflatten(0, (-1, size)).sort(1)  # a file stores no order within a group
    assert torch.equal(
        done.codes.double(), expected.unflatten(1, (-1, size)).gather(2, within.expand(5, -1, -1)).flatten(1)
    )
    # float32 compared with float64 through up to 480 updates
    torch.testing.assert_close(done.scales.double(), torch.stack(chosen, 1), rtol=1e-4, atol=0)
    if act_order:
        assert done.permutation is not None
        assert torch.equal(done.permutation, order.flatten())
    else:
        assert done.permutation is None


@each("static_groups", [False, True])
@each("act_order", [False, True])
@each("format", FORMATS)
def test_the_output_error_is_below_that_of_rounding(format: WeightFormat, act_order: bool, static_groups: bool) -> None:
    x, weight = correlated(500, 96), random(13, 96)
    done = rounded_by_gptq(weight, hessian_of(x), format, act_order=act_order, static_groups=static_groups)
    held_out = correlated(500, 96)[250:]
    assert output_error(x, weight, done) < 0.7 * output_error(x, weight, quantize(weight, format))
    assert output_error(held_out, weight, done) < 0.7 * output_error(held_out, weight, quantize(weight, format))


@each("act_order", [False, True])
@each("format", FORMATS)
def test_a_weight_on_the_grid_comes_back(format: WeightFormat, act_order: bool) -> None:
    on_grid = rounded_to_nearest(random(6, 96), format)
    done = rounded_by_gptq(on_grid.dequantize(), hessian_of(correlated(300, 96)), format, act_order=act_order)
    # a recomputed scale may differ in its last bit
    torch.testing.assert_close(done.dequantize(), on_grid.dequantize(), rtol=1e-6, atol=1e-6)


def test_permuted_codes_meet_permuted_inputs() -> None:
    x, weight = correlated(200, 64), random(3, 64)
    done = rounded_by_gptq(weight, hessian_of(x), GROUPS, static_groups=False)
    assert done.permutation is not None
    permuted = QuantizedWeight(done.codes, done.scales).dequantize()
    # the same products summed in another order
    torch.testing.assert_close(x[:, done.permutation] @ permuted.T, x @ done.dequantize().T, rtol=1e-4, atol=1e-3)


def test_a_hessian_of_low_rank_is_damped_until_it_can_be_inverted() -> None:
    x, weight = correlated(7, 64) * 1e3, random(3, 64)
    done, damping = (
        rounded_by_gptq(weight, hessian_of(x), GROUPS, damping=1e-9),
        inverse_factor(hessian_of(x), 1e-9, True).damping,
    )
    assert damping > 1e-9
    assert damping == pytest.approx(
        1e-9 * 10 ** round(torch.tensor(damping / 1e-9).log10().item()), rel=1e-6
    )  # ten times as large each time
    assert bool(done.dequantize().isfinite().all())
    assert output_error(x, weight, done) < output_error(x, weight, quantize(weight, GROUPS))


@each("scale", [1e-15, 1e15])
def test_tiny_and_huge_activations(scale: float) -> None:
    x, weight = correlated(200, 64), random(3, 64)
    plain = rounded_by_gptq(weight, hessian_of(x), GROUPS)
    hessian = hessian_of(x) * scale**2
    scaled = rounded_by_gptq(weight, hessian, GROUPS)
    assert inverse_factor(hessian, 0.01, True).damping == 0.01
    # the solution does not change; roundings of the scaled Hessian may change single codes
    assert (plain.codes != scaled.codes).float().mean() < 0.02


def test_channels_without_activations_are_rounded_to_nearest() -> None:
    x, weight = correlated(200, 64), random(3, 64)
    x[:, ::2] = 0
    for act_order in (False, True):
        done = rounded_by_gptq(weight, hessian_of(x), GROUPS, act_order=act_order)
        assert torch.equal(done.codes[:, ::2], quantize(weight, GROUPS).codes[:, ::2])
    nothing = rounded_by_gptq(weight, torch.zeros(64, 64), GROUPS)
    assert torch.equal(nothing.codes, quantize(weight, GROUPS).codes)


@each("static_groups", [False, True])
def test_zero_rows_and_single_rows(static_groups: bool) -> None:
    hessian = hessian_of(correlated(200, 64))
    weight = random(3, 64)
    weight[1] = 0
    done = rounded_by_gptq(weight, hessian, ASYMMETRIC, static_groups=static_groups)
    assert torch.equal(done.dequantize()[1], torch.zeros(64))
    alone = rounded_by_gptq(weight[:1], hessian, ASYMMETRIC, static_groups=static_groups)
    assert torch.equal(alone.codes, done.codes[:1])  # rows do not depend on each other


def test_the_same_input_gives_the_same_bits() -> None:
    weight, hessian = random(9, 160), hessian_of(correlated(300, 160))
    before = weight.clone(), hessian.clone()
    once, again = (rounded_by_gptq(weight, hessian, GROUPS, static_groups=False) for _ in range(2))
    assert torch.equal(once.codes, again.codes)
    assert torch.equal(once.scales, again.scales)
    assert torch.equal(weight, before[0])  # neither is changed
    assert torch.equal(hessian, before[1])


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """Ranks have fewer threads than one process. At these sizes torch's own factor, updates and sums differ between one
    thread and two."""
    x, weight = correlated(512, 320), 0.05 * random(700, 320)
    groups, results, before = WeightFormat(bits=4, group_size=32), [], torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        chosen = rounded_by_gptq(weight, hessian_of(x), groups)
        results.append((chosen.codes, torch.stack([sum_of_squares(x[i:]) for i in range(8)])))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))


def test_the_hessian_is_the_mean_of_squares_however_it_is_cut() -> None:
    x = correlated(101, 24)
    hessian = Hessian(24)
    for chunk in x.split([1, 0, 60, 40]):
        hessian.add(chunk)
    expected = x.double().T @ x.double() / 101
    # float32 sums of 101 products, relative to the largest of them
    torch.testing.assert_close(hessian.mean().double(), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))


@each(("chunk", "message"), [(torch.zeros(0, 4), "no activations"), (torch.full((2, 4), 1e20), "NaN or infinite")])
def test_a_hessian_of_nothing_or_of_no_numbers_is_refused(chunk: Tensor, message: str) -> None:
    hessian = Hessian(4)
    hessian.add(chunk)
    with pytest.raises(UserError, match=message):
        hessian.mean()


def test_bad_damping_and_bad_groups_are_refused() -> None:
    with pytest.raises(UserError, match=re.escape("damping=0.0 is not allowed: give a positive number")):
        rounded_by_gptq(random(3, 64), torch.eye(64), GROUPS, damping=0.0)
    with pytest.raises(UserError, match="groups of 16 do not divide the 60 input channels"):
        rounded_by_gptq(random(3, 60), torch.eye(60), GROUPS)

"""Rows grouped by expert and summed again equal the reference bit for bit; grouped products have the bits of single
products."""

import pytest
import torch
from torch import Tensor

from kernels import linear as products
from kernels.moe import combine_rows, group_rows, reference, route, route_corrected
from kernels.quantize_rows import QuantizedActivations, quantize_rows
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

SIZES = [(1, 1, 1, 8), (1, 8, 128, 33), (5, 2, 3, 1500), (63, 4, 60, 40), (1000, 8, 128, 5)]  # T, K, N, E


def choose(num_tokens: int, num_chosen: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.rand(num_tokens, num_experts, generator=generator).topk(num_chosen).indices


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("sizes", SIZES)
@poisoned()
def test_equals_the_reference(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_chosen, num_experts, channels = sizes
    x, chosen = randn(num_tokens, channels, dtype=dtype), choose(num_tokens, num_chosen, num_experts)
    rows, starts, places = group_rows(x, chosen, num_experts)
    for actual, expected in zip((rows, starts, places), reference.group_rows(x, chosen, num_experts), strict=True):
        assert torch.equal(actual, expected)
    parts, weights = randn(num_tokens * num_chosen, channels, dtype=dtype), randn(num_tokens, num_chosen).abs()
    assert torch.equal(combine_rows(parts, weights, places), reference.combine_rows(parts, weights, places))


@any_way
@each("renormalise", [False, True])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("sizes", SIZES)
@poisoned()
def test_routes_by_a_softmax(sizes: tuple[int, int, int, int], dtype: torch.dtype, renormalise: bool) -> None:
    num_tokens, num_chosen, num_experts, _ = sizes
    logits = (3 * randn(num_tokens, num_experts)).to(dtype)  # of 16 bits: with ties
    weights, chosen = route(logits, num_chosen, renormalise)
    order = logits.double().argsort(dim=-1, descending=True, stable=True)[:, :num_chosen]
    assert torch.equal(chosen, order)
    exact = logits.double().softmax(-1).gather(-1, order)
    exact = exact / exact.sum(-1, keepdim=True) if renormalise else exact
    # a sum of 128 float32 is rounded 128 times by 2^-24, the exponential by 2 of 2^-23
    torch.testing.assert_close(weights.double(), exact, rtol=2**-17, atol=0)
    assert weights.dtype == torch.float32
    for rows in (slice(0, 1), slice(-7, None)):
        part = route(logits[rows], num_chosen, renormalise)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, (weights, chosen), strict=True))


@any_way
@each("num_chosen", [0, 4])
def test_refuses_to_choose_none_or_more_than_there_are(num_chosen: int) -> None:
    with pytest.raises(ValueError, match=f"{num_chosen} of 3 experts cannot be chosen: at least 1, at most all"):
        route(randn(5, 3), num_chosen, True)


def chosen_by_hand(
    corrected: list[float], num_chosen: int, num_groups: int, num_kept: int, num_scored: int
) -> list[int]:
    """Return a token's experts from the groups with the highest sum of their `num_scored` best scores."""
    size = len(corrected) // num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(num_groups)]
    best = sorted(groups, key=lambda group: -sum(sorted(corrected[i] for i in group)[-num_scored:]))[:num_kept]
    return sorted((i for group in best for i in group), key=lambda i: -corrected[i])[:num_chosen]


@any_way
@each("renormalise", [False, True])
@each("is_softmax", [False, True])
@each(
    "sizes, num_groups, num_kept, num_scored",
    [
        ((1, 1, 1), 1, 1, 2),
        ((70, 4, 24), 1, 1, 2),
        ((70, 4, 24), 4, 2, 2),
        ((70, 4, 24), 4, 2, 1),
        ((70, 3, 7), 7, 3, 1),  # groups of one expert
        ((33, 6, 12), 2, 1, 2),
        ((33, 8, 256), 8, 8, 2),
    ],
)
@poisoned()
def test_routes_by_corrected_scores(
    sizes: tuple[int, int, int],
    num_groups: int,
    num_kept: int,
    num_scored: int,
    is_softmax: bool,
    renormalise: bool,
) -> None:
    num_tokens, num_chosen, num_experts = sizes
    logits, correction = randn(num_tokens, num_experts), randn(num_experts) / num_experts
    settings = num_chosen, renormalise, is_softmax, num_groups, num_kept, num_scored
    weights, chosen = route_corrected(logits, correction, *settings)
    scores = logits.double().softmax(-1) if is_softmax else logits.double().sigmoid()
    corrected = (scores + correction.double()).tolist()
    assert chosen.tolist() == [
        chosen_by_hand(scores, num_chosen, num_groups, num_kept, num_scored) for scores in corrected
    ]
    exact = scores.gather(-1, chosen)
    exact = exact / exact.sum(-1, keepdim=True) if renormalise else exact
    # a sum of 256 float32 is rounded 256 times by 2^-24, the exponential by 2 of 2^-23
    torch.testing.assert_close(weights.double(), exact, rtol=2**-16, atol=0)
    for rows in (slice(0, 1), slice(-7, None)):
        part = route_corrected(logits[rows], correction, *settings)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, (weights, chosen), strict=True))


@any_way
def test_refuses_corrections_groups_and_choices_that_cannot_be() -> None:
    logits, correction = randn(5, 12), randn(12)
    for others in (
        (logits[0], correction),
        (logits, correction[:1]),
        (logits.half(), correction),
        (logits, correction.double()),
    ):
        with pytest.raises(ValueError, match=r"are not logits \[T, N\] and corrections \[N\] of float32"):
            route_corrected(*others, 2, True)
    for groups, kept in ((5, 1), (3, 4), (3, 0), (12, 2)):
        with pytest.raises(ValueError, match=f"{kept} of {groups} groups of 12 experts cannot be kept"):
            route_corrected(logits, correction, 2, True, False, groups, kept)
    for num_scored in (0, 3):
        with pytest.raises(ValueError, match=f"a group cannot be scored by its {num_scored} best experts: by 1 or 2"):
            route_corrected(logits, correction, 2, True, False, 3, 1, num_scored)
    for num_chosen in (0, 5):
        with pytest.raises(ValueError, match=f"{num_chosen} of 4 experts cannot be chosen: at least 1, at most all"):
            route_corrected(logits, correction, num_chosen, True, False, 3, 1)


@any_way
def test_damaged_logits_choose_experts_that_exist() -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((2, 6), bad)
        logits[1, 2] = 1
        corrected = [route_corrected(logits, randn(6), 3, True, *others)[1] for others in ((True,), (False, 3, 2))]
        for chosen in (route(logits, 3, True)[1], *corrected):
            assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in chosen.tolist())


@any_way
@poisoned()
def test_rows_are_grouped_by_expert_and_summed_exactly() -> None:
    x, chosen = randn(7, 5, dtype=torch.bfloat16), choose(7, 3, 6)
    rows, starts, places = group_rows(x, chosen, 6)
    assert torch.equal(rows[places], x[:, None].expand(7, 3, 5))
    experts = torch.searchsorted(starts, places, right=True) - 1
    assert torch.equal(experts, chosen)
    parts, weights = randn(21, 5, dtype=torch.bfloat16), torch.rand(7, 3)
    exact = (weights.double()[:, :, None] * parts.double()[places]).sum(1)
    # the sum is rounded once to 8 bits; the float32 roundings are far smaller
    torch.testing.assert_close(combine_rows(parts, weights, places).double(), exact, rtol=2**-8, atol=1e-6)


@any_way
def test_no_tokens() -> None:
    rows, starts, places = group_rows(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int64), 3)
    assert (rows.shape, starts.tolist(), places.shape) == ((0, 8), [0, 0, 0, 0], (0, 2))
    assert combine_rows(rows, torch.empty(0, 2), places).shape == (0, 8)


@compiled
def test_the_sum_does_not_depend_on_threads_or_on_the_order_of_choice() -> None:
    chosen, parts, weights = choose(90, 4, 9), randn(360, 700), torch.rand(90, 4)
    places = group_rows(parts[:90], chosen, 9)[2]
    set_threads(1)
    batch_result = combine_rows(parts, weights, places)
    for num_threads in (1, 2, 3, 4):
        set_threads(num_threads)
        assert torch.equal(combine_rows(parts, weights, places), batch_result)
        assert torch.equal(combine_rows(parts, weights.flip(1), places.flip(1)), batch_result)


STARTS = [[0, 5], [0, 0, 1, 1, 40, 57, 57], [0, 0, 0], list(range(0, 130, 3))]


@any_way
@each("starts", STARTS)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@poisoned()
def test_grouped_product_has_the_bits_of_single_ones(starts: list[int], dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((100, 65), (16, 32), (257, 8)):
        x = randn(starts[-1], num_inputs, dtype=dtype)
        packed = [products.pack(randn(num_outputs, num_inputs, i, dtype=dtype)[:, :, 0]) for i in range(1, len(starts))]
        result = products.grouped_matmul(x, products.WeightGroup(packed), torch.tensor(starts))
        single = [products.matmul(x[a:b], w) for a, b, w in zip(starts, starts[1:], packed, strict=False)]
        assert torch.equal(result, torch.cat(single))
        weights = products.WeightGroup(packed)
        biases = randn(len(packed), num_outputs, dtype=dtype)
        result = products.grouped_matmul(x, weights, torch.tensor(starts), biases=biases)
        ranges = zip(starts, starts[1:], packed, biases, strict=False)
        assert torch.equal(result, torch.cat([products.matmul(x[a:b], w, bias) for a, b, w, bias in ranges]))
        result = products.grouped_matmul(x, weights, torch.tensor(starts), products.WeightGroup(packed[::-1]))
        both = zip(starts, starts[1:], packed, packed[::-1], strict=False)
        assert torch.equal(result, torch.cat([products.matmul_swiglu(x[a:b], gate, up) for a, b, gate, up in both]))


@any_way
@each("first", [0, 1, 2, 3, 5])
@poisoned()
def test_grouped_product_of_some_weights(first: int) -> None:
    """Rows of experts on this rank are between rows of other experts, and may be none."""
    starts, weights = [0, 0, 1, 1, 40, 57, 57, 60], [products.pack(randn(33, 17, i)[:, :, 0]) for i in range(1, 8)]
    x, rank_rows = randn(60, 17), slice(starts[first], starts[first + 2])
    all_outputs = products.grouped_matmul(x, products.WeightGroup(weights), torch.tensor(starts))
    some = products.WeightGroup(weights[first : first + 2])
    result = products.grouped_matmul(x, some, torch.tensor(starts)[first : first + 3])
    assert result.shape == all_outputs.shape
    assert torch.equal(result[rank_rows], all_outputs[rank_rows])


@any_way
@each("starts", STARTS)
@each("bits, groups, zeros", [(8, 1, False), (8, 2, False), (4, 1, True), (4, 4, False)])
@poisoned()
def test_grouped_quantised_product_has_the_bits_of_single_ones(
    starts: list[int], bits: int, groups: int, zeros: bool
) -> None:
    num_outputs, num_inputs = 100, 128
    x = randn(starts[-1], num_inputs, dtype=torch.bfloat16)
    packed = []
    for i in range(1, len(starts)):
        generator = torch.Generator().manual_seed(i)
        low, high = (-127, 128) if bits == 8 else (0, 16) if zeros else (-8, 8)
        codes = torch.randint(low, high, (num_outputs, num_inputs), dtype=torch.int8, generator=generator)
        scales = torch.rand(num_outputs, groups, generator=generator) + 0.1
        points = torch.full((num_outputs, groups), i % 16, dtype=torch.int8) if zeros else None
        packed.append(products.pack_codes(codes, scales, points, bits))
    weights, expert_ranges = products.WeightGroup(packed), list(zip(starts, starts[1:], packed, strict=False))
    result = products.grouped_matmul(x, weights, torch.tensor(starts))
    assert torch.equal(result, torch.cat([products.matmul(x[a:b], w) for a, b, w in expert_ranges]))
    ups = products.WeightGroup(packed[::-1])
    result = products.grouped_matmul(x, weights, torch.tensor(starts), ups)
    both = zip(starts, starts[1:], packed, packed[::-1], strict=False)
    assert torch.equal(result, torch.cat([products.matmul_swiglu(x[a:b], w, up) for a, b, w, up in both]))
    codes, scales = quantize_rows(x)
    rows = QuantizedActivations(codes, scales, x.dtype)
    biases = randn(len(packed), num_outputs, dtype=x.dtype)
    result = products.grouped_matmul(rows, weights, torch.tensor(starts), biases=biases)
    single = [
        products.matmul(QuantizedActivations(codes[a:b], scales[a:b], x.dtype), w, bias)
        for (a, b, w), bias in zip(expert_ranges, biases, strict=True)
    ]
    assert torch.equal(result, torch.cat(single))


@compiled
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    starts = torch.tensor(STARTS[1])
    packed = products.WeightGroup(
        [products.pack(randn(300, 65, i, dtype=dtype)[:, :, 0]) for i in range(1, len(starts))]
    )
    x = randn(57, 65, dtype=dtype)
    set_threads(1)
    batch_result = products.grouped_matmul(x, packed, starts)
    for num_threads in (2, 3, 4):
        set_threads(num_threads)
        assert torch.equal(products.grouped_matmul(x, packed, starts), batch_result)


@any_way
def test_numbers_that_do_not_lie_side_by_side() -> None:
    chosen, parts, weights = choose(7, 2, 5), randn(14, 9), randn(2, 7).abs().T
    places = group_rows(parts[:7], chosen, 5)[2]
    apart = torch.stack((places, torch.full_like(places, 10**9)), -1)[..., 0]
    exact = (weights.double()[:, :, None] * parts.double()[places]).sum(1)
    # a sum of two products, rounded three times by 2^-24 of numbers up to 5
    for same in (weights, weights.double()):
        torch.testing.assert_close(combine_rows(parts, same, apart).double(), exact, rtol=0, atol=1e-6)
    for actual, expected in zip(group_rows(parts[:7], chosen.int(), 5), group_rows(parts[:7], chosen, 5), strict=True):
        assert torch.equal(actual, expected)


@any_way
def test_refuses_gates_and_partners_that_differ() -> None:
    x, starts = randn(6, 64), torch.tensor([0, 2, 6])
    dense = {n: products.WeightGroup([products.pack(randn(n, 64))] * 2) for n in (17, 18)}
    one, narrow = (products.WeightGroup([products.pack(randn(17, n))]) for n in (64, 63))
    with pytest.raises(ValueError, match="gates 2 of 17 outputs, but ups 2 of 18 outputs"):
        products.grouped_matmul(x, dense[17], starts, dense[18])  # the same number of tiles
    with pytest.raises(ValueError, match="gates 2 of 17 outputs, but ups 1 of 17 outputs"):
        products.grouped_matmul(x, dense[17], starts, one)
    with pytest.raises(ValueError, match="cannot be multiplied by a weight of 63 inputs"):
        products.grouped_matmul(x, dense[17], starts, narrow)
    with pytest.raises(ValueError, match=r"biases \[1, 17\] of torch.float32, not \[2, 17\] of torch.float32"):
        products.grouped_matmul(x, dense[17], starts, biases=randn(1, 17))
    with pytest.raises(ValueError, match="biases of gates are not supported"):
        products.grouped_matmul(x, dense[17], starts, dense[17], randn(2, 17))
    coded = {n: products.pack_codes(torch.ones(n, 64, dtype=torch.int8), torch.ones(n, 1), None, 8) for n in (17, 18)}
    weights = products.WeightGroup([coded[17]] * 2)
    with pytest.raises(ValueError, match="gates 2 of 17 outputs, but ups 2 of 18 outputs"):
        products.grouped_matmul(x, weights, starts, products.WeightGroup([coded[18]] * 2))
    with pytest.raises(ValueError, match="gates 2 of 17 outputs, but ups 1 of 17 outputs"):
        products.grouped_matmul(x, weights, starts, products.WeightGroup([coded[17]]))
    codes = torch.ones(6, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match="1 scale for 6 rows: grouped weights need one scale per row"):
        products.grouped_matmul(QuantizedActivations(codes, torch.ones(1, 1), x.dtype), weights, starts)


def test_refuses_weights_that_differ() -> None:
    with pytest.raises(ValueError, match="several shapes or formats"):
        products.WeightGroup([products.pack(torch.zeros(16, 8)), products.pack(torch.zeros(16, 9))])
    weights = [products.pack_codes(torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, n), None, 8) for n in (1, 2)]
    with pytest.raises(ValueError, match="several shapes or formats"):
        products.WeightGroup(weights)

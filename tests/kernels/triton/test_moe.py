"""All experts in two launches compared with one expert after the other, in float64. Experts without tokens are NaN."""

from itertools import product

import pytest
import torch

from kernels.linear.gpu_weight import of_floats
from kernels.moe import reference, route, triton
from kernels.quantize_rows import ActivationFormat
from kernels.swiglu.reference import swiglu
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, EXPERT_FORMATS, assert_near, noise, tiers
from tests.helpers.triton_experts import check_mixture, choose, make_experts


@pytest.mark.long
@tiers("kind, chosen", list(EXPERT_FORMATS), [[[2, 0], [0, 4], [2, 4]], [[4, 2]]])
def test_quantised_experts(kind: str, chosen: list[list[int]]) -> None:
    size, channels = 136, 140 if "blocks" in kind else 72  # parts of tiles and of groups
    if "fp4" in kind:  # whole blocks
        size, channels = (160, 96) if kind == "mxfp4" else (192, 320)
    check_mixture(kind, torch.tensor(chosen), 5, size, channels)


@each("kind, tokens", product(["w8a8", "fp8"], [1, 4]))
def test_each_expert_quantises_with_its_own_scale(kind: str, tokens: int) -> None:
    """Some values are beyond the largest code."""
    chosen, (weights, x) = choose(tokens, 5, 2), (noise(tokens, 2, seed=1).abs(), noise(tokens, 136))
    gate_up, gate_up_values = make_experts(10, 40, 136, kind)
    down, down_values = make_experts(5, 136, 40, kind)
    dtype = EXPERT_FORMATS[kind][1]
    hidden = swiglu(x.double() @ gate_up_values[0].T, x.double() @ gate_up_values[5].T).abs().max().float()
    scales = torch.arange(1, 6) / (200 if dtype == torch.int8 else 1000)
    rows = [ActivationFormat(dtype, None, scale) for scale in (scales, scales * hidden)]
    expected = reference.mixture(x.double(), gate_up_values, down_values, weights, chosen, *rows)
    on_gpu = (ActivationFormat(dtype, None, row.static_scales.to(DEVICE)) for row in rows)
    result = triton.mixture(x.to(DEVICE), gate_up, down, weights.to(DEVICE), chosen.to(DEVICE), *on_gpu)
    assert_near(result, expected, 2e-3 if dtype == torch.int8 else 1e-2)  # as in `check_mixture`


@each("kind", ["w4a16 g128", "w8a8", "fp8 blocks"])
def test_all_tokens_at_one_expert(kind: str) -> None:
    check_mixture(kind, torch.full((20, 1), 2), 4, 130, 40)  # a program has 16


# one per way to launch
@tiers("kind, tokens_and_experts", ["w8a16", "w4a16 g32 zero", "fp8 weight"], [(1, 3), (40, 3), (130, 2)])
def test_quantised_experts_in_bfloat16(kind: str, tokens_and_experts: tuple[int, int]) -> None:
    tokens, experts = tokens_and_experts
    check_mixture(kind, choose(tokens, experts, 2), experts, 96, 40, torch.bfloat16)


@tiers("tokens, experts, dtype", [70, 1, 5], [9, 1, 4], [torch.bfloat16, torch.float32])
def test_experts_of_floats(tokens: int, experts: int, dtype: torch.dtype) -> None:
    size, channels = 72, 40
    x = noise(tokens, size, dtype=dtype)
    weights, chosen = route(noise(tokens, experts, seed=1), min(2, experts), True)
    gate_up = noise(2 * experts, channels, size, dtype=dtype, seed=2)
    down = noise(experts, size, channels, dtype=dtype, seed=3)
    idle = [number for number in range(experts) if number not in chosen]
    gate_up[idle], gate_up[[experts + number for number in idle]], down[idle] = torch.nan, torch.nan, torch.nan
    expected = reference.mixture(x.double(), gate_up.double(), down.double(), weights, chosen)
    stacked = of_floats(gate_up.to(DEVICE)), of_floats(down.to(DEVICE))
    # `hidden` is also rounded to bfloat16
    assert_near(triton.mixture(x.to(DEVICE), *stacked, weights.to(DEVICE), chosen.to(DEVICE)), expected)


@tiers(
    "sizes, renormalise, dtype",
    [(160, 6), (1, 1), (3, 2), (8, 2), (60, 4), (128, 8)],  # experts, experts per token
    [True, False],
    [torch.bfloat16, torch.float32, torch.float16],
)
def test_routes_by_a_softmax(sizes: tuple[int, int], renormalise: bool, dtype: torch.dtype) -> None:
    experts, per_token = sizes
    logits = (3 * noise(6, experts)).to(dtype)  # of 16 bits: with ties
    logits[3] = 1.5
    logits[4, : experts // 2] = -torch.inf
    weights, chosen = (part.cpu() for part in triton.route(logits.to(DEVICE), per_token, renormalise))
    order = logits.double().argsort(dim=-1, descending=True, stable=True)[:, :per_token]
    assert torch.equal(chosen, order)
    exact = logits.double().softmax(-1).gather(-1, order)
    exact = exact / exact.sum(-1, keepdim=True) if renormalise else exact
    # a sum of 160 float32 in a tree of 8 roundings by 2^-24, the exponential by 4 of 2^-23
    torch.testing.assert_close(weights.double(), exact, rtol=2**-19, atol=0)
    assert weights.dtype == torch.float32


def test_damaged_logits_are_chosen_as_the_reference_does() -> None:
    logits = noise(6, 9)
    logits[0, [7, 2]], logits[1], logits[2, 5], logits[3], logits[4] = torch.nan, torch.nan, torch.inf, -torch.inf, 0
    logits[4, ::2] = -0.0
    weights, chosen = (part.cpu() for part in triton.route(logits.to(DEVICE), 4, True))
    expected, order = reference.route(logits, 4, True)
    assert torch.equal(chosen, order)
    assert torch.equal(weights.isnan(), expected.isnan())


@each("tokens, experts, per_token", [(2, 1, 1), (7, 20, 4), (800, 5, 3)])
def test_pairs_are_sorted_by_expert(tokens: int, experts: int, per_token: int) -> None:
    chosen = choose(tokens, experts, per_token)
    chosen = torch.where(chosen == 3, 4, chosen)  # one expert without pairs, one that a token may have twice
    pairs = triton._sorted(chosen.to(DEVICE), experts + 1)
    flat = chosen.flatten()
    assert torch.equal(pairs.order.cpu().long(), flat.argsort(stable=True))
    assert torch.equal(pairs.starts.cpu().long(), torch.tensor([(flat < n).sum() for n in range(experts + 2)]))


def test_no_tokens() -> None:
    empty = torch.empty(0, 2, device=DEVICE)
    matrices = of_floats(noise(6, 8, 8).to(DEVICE)), of_floats(noise(3, 8, 8).to(DEVICE))
    result = triton.mixture(noise(0, 8).to(DEVICE), *matrices, empty, empty.long())
    assert result.shape == (0, 8)
    assert [part.shape for part in triton.route(empty, 2, True)] == [(0, 2), (0, 2)]

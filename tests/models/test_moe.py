"""Mixtures of experts: the formula in float64, and a token's bits do not depend on the batch."""

import pytest
import torch
from torch import nn

from kernels import build
from kernels.capture import capture
from kernels.linear import linear
from kernels.moe import group_rows, route
from models.layers.dense import PackedDenseMethod, StoredFloats
from models.layers.mlp import MLP
from models.layers.moe import Experts
from tests.helpers.cases import each

HIDDEN, INTERMEDIATE = (
    40,
    32,
)  # torch's silu has other bits for other numbers of rows if 32 channels do not fill vectors


def random_experts(count: int, dtype: torch.dtype, num_experts_per_tok: int, packed: bool = False) -> Experts:
    generator = torch.Generator().manual_seed(0)
    experts = Experts((MLP(HIDDEN, INTERMEDIATE) for _ in range(count)), num_experts_per_tok).to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    if packed:
        for layer in (part for expert in experts for part in expert.parts):
            method = PackedDenseMethod(StoredFloats(layer.shape))
            method.load({"weight": layer.weight.detach()}, dtype, torch.device("cpu"))
            layer.method = method
    return experts


@each("renormalise", [False, True])
@torch.inference_mode()
def test_equals_the_formula(renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, HIDDEN, generator=generator, dtype=torch.float64)
    logits = torch.randn(23, 7, generator=generator, dtype=torch.float64)
    experts = random_experts(7, torch.float64, 3)
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for t in range(23):
        best = sorted(range(7), key=lambda n: -probabilities[t, n].item())[:3]
        total = sum(probabilities[t, n] for n in best) if renormalise else 1
        expected[t] = sum(probabilities[t, n] / total * experts[n](x[t : t + 1], None)[0] for n in best)
    weights, chosen = route(logits, 3, renormalise)
    # 1e-6: the weights are float32, the values are of order 1
    torch.testing.assert_close(experts(x, weights, chosen), expected, atol=1e-6, rtol=0)


@pytest.mark.skipif(
    build.library() is None, reason="torch's sums may run in an order that depends on the number of rows"
)
@each("packed", [False, True])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("count", [1, 4, 6, 60, 128])
@torch.inference_mode()
def test_a_token_is_the_same_in_any_company(dtype: torch.dtype, count: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(90, HIDDEN, generator=generator).to(dtype)
    router = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    experts = random_experts(count, dtype, min(count, 4), packed)
    experts.merge()

    def block(rows: torch.Tensor) -> torch.Tensor:
        return experts(rows, *route(linear(rows, router), min(count, 4), True))

    batch_result = block(x)
    for size in (1, 2, 3, 11, 12, 13, 40):
        for start in (0, 5, 90 - size):
            assert torch.equal(block(x[start : start + size]), batch_result[start : start + size]), (size, start)


@each("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_all_in_a_few_calls_equals_one_by_one_and_reads_no_idle_expert(dtype: torch.dtype) -> None:
    experts = random_experts(9, dtype, 3, packed=True)
    x, logits = torch.randn(2, 5, max(HIDDEN, 9), generator=torch.Generator().manual_seed(3)).to(dtype)
    weights, chosen = route(logits[:, :9], 3, False)
    idle = set(range(9)) - set(chosen.unique().tolist())
    assert idle
    for number in idle:
        experts[number].up_proj.tiles.fill_(torch.nan)
    one_by_one = experts(x[:, :HIDDEN], weights, chosen)
    experts.merge()
    called: list[nn.Module] = []
    for expert in experts:
        expert.register_forward_pre_hook(lambda module, inputs: called.append(module))
    assert torch.equal(experts(x[:, :HIDDEN], weights, chosen), one_by_one)
    assert called == []
    assert one_by_one.isfinite().all()


@torch.inference_mode()
def test_a_replay_chooses_its_own_experts() -> None:
    experts = random_experts(9, torch.bfloat16, 3, packed=True)
    experts.merge()

    def block(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return experts(x, *route(logits, 3, True))

    x, logits = torch.randn(4, HIDDEN).bfloat16(), torch.randn(4, 9)
    graph, output = capture(lambda: block(x, logits))
    assert (graph is not None) == (build.library() is not None)
    if graph is not None:
        x.copy_(torch.randn(4, HIDDEN))
        logits.copy_(-logits)
        graph.replay()
        assert torch.equal(output, block(x, logits))


@torch.inference_mode()
def test_one_by_one_is_not_captured() -> None:
    experts = random_experts(9, torch.bfloat16, 3, packed=True)
    rows, starts, _ = group_rows(torch.randn(4, HIDDEN).bfloat16(), torch.arange(12).view(4, 3) % 9, 9)
    assert capture(starts.tolist)[0] is None
    graph, _ = capture(lambda: experts(rows, torch.ones(12, 1), torch.arange(12)[:, None] % 9))
    assert graph is None


def test_a_layer_of_another_kind_leaves_them_one_by_one() -> None:
    mixed, plain = random_experts(4, torch.float32, 2, packed=True), random_experts(4, torch.float32, 2)
    mixed[2].down_proj.method = plain[2].down_proj.method
    x, (weights, chosen) = torch.randn(6, HIDDEN), route(torch.randn(6, 4), 2, True)
    mixed.merge()
    # both sum up to 40 products in float32, in different orders
    torch.testing.assert_close(mixed(x, weights, chosen), plain(x, weights, chosen), atol=1e-5, rtol=1e-5)


def test_expected_share_of_experts_that_tokens_read() -> None:
    experts = random_experts(6, torch.float32, 2)
    assert experts.active_share(1) == pytest.approx(2 / 6)
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 5, 6, generator=generator).topk(2).indices.flatten(1)
    seen = sum(len(row.unique()) for row in draws) / len(draws) / 6
    assert experts.active_share(5) == pytest.approx(seen, abs=0.01)  # four standard deviations of 4000 draws

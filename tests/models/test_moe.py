"""Mixtures of experts: the formula in float64, and the same bits for a token in any company."""

import pytest
import torch
from torch import nn

from models.decoder import MLP
from models.layers.linear import linear
from models.layers.moe import route, run_experts

HIDDEN, INTERMEDIATE = (
    40,
    32,
)  # silu's bits depend on the number of rows where these do not fill vectors (32 channels on AVX-512)


def random_experts(count: int, dtype: torch.dtype) -> nn.ModuleList:
    generator = torch.Generator().manual_seed(0)
    experts = nn.ModuleList(MLP(HIDDEN, INTERMEDIATE) for _ in range(count)).to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return experts


@pytest.mark.parametrize("renormalise", [False, True])
@torch.inference_mode()
def test_equals_the_formula(renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, HIDDEN, generator=generator, dtype=torch.float64)
    logits = torch.randn(23, 7, generator=generator, dtype=torch.float64)
    experts = random_experts(7, torch.float64)
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for t in range(23):
        best = sorted(range(7), key=lambda n: -probabilities[t, n].item())[:3]
        total = sum(probabilities[t, n] for n in best) if renormalise else 1
        expected[t] = sum(probabilities[t, n] / total * experts[n](x[t : t + 1])[0] for n in best)
    weights, chosen = route(logits, 3, renormalise)
    # 1e-6: the weights are float32, the values are of order 1
    torch.testing.assert_close(run_experts(experts, x, weights, chosen), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 6, 60, 128])
@torch.inference_mode()
def test_a_token_is_the_same_in_any_company(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(90, HIDDEN, generator=generator).to(dtype)
    router = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    experts = random_experts(count, dtype)

    def block(rows: torch.Tensor) -> torch.Tensor:
        return run_experts(experts, rows, *route(linear(rows, router), min(count, 4), True))

    whole = block(x)
    for size in (1, 2, 3, 11, 12, 13, 40):
        for start in (0, 5, 90 - size):
            assert torch.equal(block(x[start : start + size]), whole[start : start + size]), (size, start)

"""Draws without sorting against draws that sort in float64; and the reference against the engine's own sampler."""

import pytest
import torch
from torch import Tensor

from kernels.sampling import reference, triton
from pipelines.engine import sampler
from tests.kernels.triton.cases import DEVICE, noise

GENERATOR = torch.Generator().manual_seed(5)


def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


def settings(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, ...]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=GENERATOR)
    options = (torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p))
    return *options, torch.full((rows,), min_p), seeds, torch.arange(rows)


@pytest.mark.parametrize("vocab_size", [5, 300, 9001])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7, "temperature": 3.0},
        {"top_p": 0.5, "temperature": 2.0},
        {"top_p": 0.01},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_same_tokens_as_with_sorting(vocab_size: int, options: dict[str, float]) -> None:
    rows = 3 if vocab_size <= 300 else 2
    logits = 3 * noise(rows, vocab_size)
    each = settings(rows, **options)  # type: ignore[arg-type]
    expected = reference.sample(logits, *each)
    assert torch.equal(triton.sample(*on(DEVICE, logits, *each)).cpu(), expected)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 9, "top_p": 0.7}], ids=str)
def test_ties_are_kept_as_with_sorting(options: dict[str, float]) -> None:
    """Some eight values for 300 tokens; draws of one row."""
    logits = noise(300).round(decimals=0).expand(5, -1).contiguous()
    each = settings(5, temperature=1.5, **options)  # type: ignore[arg-type]
    tokens = triton.sample(*on(DEVICE, logits, *each)).cpu()
    assert torch.equal(tokens, reference.sample(logits, *each))
    kept = reference.kept_tokens(logits[:1].double() / 1.5, *(part[:1] for part in each[1:4]))
    assert kept[0, tokens].all()


def test_banned_tokens() -> None:
    logits = noise(3, 70)
    logits[0] = -torch.inf
    logits[1, :69] = -torch.inf
    logits[2, ::2] = -torch.inf
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}):
        each = settings(3, **options)
        tokens = triton.sample(*on(DEVICE, logits, *each)).cpu()
        assert torch.equal(tokens, reference.sample(logits, *each))
        assert tokens[:2].tolist() == [-1, 69]
        assert tokens[2] % 2 == 1


def test_reference_keeps_what_the_engine_keeps() -> None:
    scaled = (2 * noise(6, 90).double()).round(decimals=1)
    _, k, p, m, *_ = settings(6, top_k=30, top_p=0.8, min_p=0.05)
    by_engine = sampler.keep_top_p(sampler.keep_top_k(scaled, k[:, None]), p.double()[:, None])
    by_engine = sampler.keep_min_p(by_engine, m.double()[:, None])
    assert torch.equal(reference.kept_tokens(scaled, k, p, m), by_engine > -torch.inf)


def test_noise_is_that_of_the_engines_stream() -> None:
    """The seed of the tokens' stream is number 5 of the sequence's stream; its uniforms have the first 40 bits of the engine's 52."""
    seed = 2**64 - 12345
    key = sampler._mix(sampler._mix(seed) + 6 * 0x9E3779B97F4A7C15)
    numbers = [(sampler._mix(key + (v + 1) * 0x9E3779B97F4A7C15) >> 24) + 0.5 for v in range(50)]
    expected = -(-torch.log1p(-torch.tensor(numbers, dtype=torch.float64) / 2**40)).log()
    result = reference.gumbel(torch.tensor([seed - 2**64]), torch.tensor([5]), 50)
    torch.testing.assert_close(result[0], expected, rtol=1e-12, atol=0)


def test_draws_follow_the_probabilities() -> None:
    logits = noise(8)
    each = settings(20_000)
    tokens = reference.sample(logits.expand(20_000, -1), *each)
    shares = tokens.bincount(minlength=8) / 20_000
    # five standard deviations of a share of 20,000 draws
    torch.testing.assert_close(shares, logits.softmax(-1), rtol=0, atol=5 * 0.5 / 20_000**0.5)


def test_penalties() -> None:
    logits = noise(3, 5000)
    counts = torch.randint(0, 3, (3, 5000), generator=GENERATOR, dtype=torch.int32)
    prompted = torch.rand(3, 5000, generator=GENERATOR) < 0.3
    penalties = (torch.tensor([1.3, 0.7, 1.0]), torch.tensor([0.5, 0.0, -1.0]), torch.tensor([0.25, 0.0, 0.1]))
    result = triton.penalize(*on(DEVICE, logits, counts, prompted, *penalties)).cpu()
    torch.testing.assert_close(result, reference.penalize(logits, counts, prompted, *penalties), rtol=0, atol=1e-6)

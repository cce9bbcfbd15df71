"""Draws without sorting compared with draws with sorting in float64."""

import torch
from torch import Tensor

from kernels.sampling import reference, triton
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, noise, tiers

GENERATOR = torch.Generator().manual_seed(5)


def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


def settings(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    fixed = torch.tensor([[temperature, top_k, top_p, min_p]], dtype=torch.float64).expand(rows, -1)
    return torch.cat((fixed, torch.rand(rows, 1, generator=GENERATOR, dtype=torch.float64)), dim=1)


OPTIONS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 3.0},
    {"top_p": 0.5, "temperature": 2.0},
    {"top_p": 0.01},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


@tiers("options, vocab_size", OPTIONS, [5, 300, 4100])
def test_same_tokens_as_with_sorting(options: dict[str, float], vocab_size: int) -> None:
    rows = 2 if vocab_size > 300 else 3
    logits, chosen = 3 * noise(rows, vocab_size), settings(rows, **options)  # type: ignore[arg-type]
    assert torch.equal(triton.draw(*on(DEVICE, logits, chosen)).cpu(), reference.draw(logits, chosen))


@each("options", [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 9, "top_p": 0.7}])
def test_ties_are_kept_as_with_sorting(options: dict[str, float]) -> None:
    """Eight different values for 300 tokens; draws of one row."""
    logits = noise(300).round(decimals=0).expand(3, -1).contiguous()
    chosen = settings(3, temperature=1.5, **options)  # type: ignore[arg-type]
    assert torch.equal(triton.draw(*on(DEVICE, logits, chosen)).cpu(), reference.draw(logits, chosen))


def test_banned_tokens_and_extreme_numbers() -> None:
    logits = noise(4, 70)
    logits[0, :69] = -torch.inf
    logits[1:, ::2] = -torch.inf
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}):
        chosen = settings(4, **options)
        chosen[2, 4], chosen[3, 4] = 0.0, 1 - 2**-52
        tokens = triton.draw(*on(DEVICE, logits, chosen)).cpu()
        assert torch.equal(tokens, reference.draw(logits, chosen))
        assert tokens[0] == 69
        assert (tokens[1:] % 2 == 1).all()

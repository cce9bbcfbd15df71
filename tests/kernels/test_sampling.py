"""Draws without sorting equal draws with sorting, for any row, settings, ties and uniform number; and the most likely
tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.sampling import draw, most_likely, reference
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled, computing, every_way

SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 40, 1.0, 0.0),
    (2.0, 1, 0.5, 0.0),
    (0.8, 50, 0.95, 0.01),
    (1.0, 0, 0.999999, 1.0),
    (1.0, 3, 0.3, 0.25),
    (1e-6, 0, 0.5, 0.0),
    (1e6, 10_000, 0.123, 0.9),
]
KINDS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda size, g: 3 * torch.randn(size, generator=g),
    "a few likely ones": lambda size, g: torch.randn(size, generator=g) + 12 * (torch.rand(size, generator=g) < 0.01),
    "ties": lambda size, g: (2 * torch.randn(size, generator=g)).round(),
    "all equal": lambda size, g: torch.full((size,), 7.0),
    "two values": lambda size, g: torch.where(torch.rand(size, generator=g) < 0.5, 1.0, -1.0),
    "one of a kind": lambda size, g: torch.where(torch.arange(size) == size // 2, 50.0, -50.0),
    "banned": lambda size, g: torch.randn(size, generator=g).masked_fill(torch.arange(size) % 3 > 0, -torch.inf),
    "falling": lambda size, g: -torch.arange(size).float() / 10,
    "large": lambda size, g: 1e30 * torch.randn(size, generator=g),
}


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 512, 513, pytest.param(5003, marks=pytest.mark.long)])
@each("kind", KINDS)
def test_draws_the_same_tokens_as_with_sorting(kind: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.stack([KINDS[kind](vocab_size, generator) for _ in SETTINGS])
    numbers = 0.0, 1 - 2**-52, *torch.rand(30, generator=generator, dtype=torch.float64).tolist()
    settings = torch.tensor([(*setting, number) for number in numbers for setting in SETTINGS], dtype=torch.float64)
    logits = logits.repeat(len(numbers), 1)
    expected = reference.draw(logits, settings)
    for way in every_way():
        with computing(way), poisoned():
            assert settings[draw(logits, settings) != expected].tolist() == []


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@each("vocab_size", [1, 2, 7, 16, 17, 512, 5003])
@poisoned()
def test_the_most_likely_is_the_first_of_the_highest(vocab_size: int, dtype: torch.dtype) -> None:
    """Compared with numpy in float64, which represents every number of the other dtypes."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = [KINDS[kind](vocab_size, generator) for kind in KINDS if kind != "large"]  # infinite in float16
    logits = torch.stack([*rows, torch.full((vocab_size,), -torch.inf)]).to(dtype)
    expected = logits.double().numpy().argmax(-1).tolist()
    assert most_likely(logits).tolist() == expected
    assert most_likely(logits[1:]).tolist() == expected[1:]
    assert most_likely(logits[:0]).tolist() == []


@any_way
@each("setting", SETTINGS)
def test_keeps_exactly_the_same_tokens(setting: tuple[float, int, float, float]) -> None:
    """A uniform number in the middle of each kept token's share draws that token."""
    logits = (4 * torch.randn(300, generator=torch.Generator().manual_seed(3))).round(decimals=1)
    temperature, top_k, top_p, min_p = (torch.tensor([[number]], dtype=torch.float64) for number in setting)
    kept = (logits.double() - logits.amax()) / temperature
    kept = reference.keep_min_p(
        reference.keep_top_p(reference.keep_top_k(kept, top_k.long()) if top_k else kept, top_p), min_p
    )
    shares = kept[0].softmax(-1)
    tokens = (shares > 1e-8).nonzero()[:, 0]
    middles = (shares.cumsum(0) - shares / 2)[tokens]
    settings = torch.tensor([(*setting, number) for number in middles.tolist()], dtype=torch.float64)
    assert torch.equal(draw(logits.expand(len(tokens), -1), settings), tokens)


@any_way
def test_numbers_on_the_border_between_two_tokens() -> None:
    """Numbers too close to a border for sums in another order are left to the reference."""
    logits = 2 * torch.randn(1, 5003, generator=torch.Generator().manual_seed(4))
    cumulative = (logits.double() - logits.amax()).softmax(-1).cumsum(-1)[0]
    numbers = (cumulative / cumulative[-1])[:-1:20].tolist()
    settings = torch.tensor([(1.0, 0, 1.0, 0.0, number) for number in numbers], dtype=torch.float64)
    rows = logits.expand(len(numbers), -1)
    assert torch.equal(draw(rows, settings), reference.draw(rows, settings))


@compiled
@each("setting", [(0.8, 0, 0.95, 0.0), (1.0, 50, 0.9, 0.02), (0.8, 0, 1.0, 0.0)])
def test_decides_alone_on_a_large_vocabulary(
    setting: tuple[float, int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits, numbers = 2.5 * torch.randn(8, 151_936, generator=generator), torch.rand(8, generator=generator)
    settings = torch.tensor([(*setting, number) for number in numbers.tolist()], dtype=torch.float64)
    expected = reference.draw(logits, settings)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "draw", None)  # the reference is not called
        for num_threads in (1, 2, 3):
            set_threads(num_threads)
            assert torch.equal(draw(logits, settings), expected)
            assert torch.equal(draw(logits[2:3], settings[2:3]), expected[2:3])


def test_refuses_other_shapes_and_dtypes() -> None:
    with pytest.raises(ValueError, match="rows of float32, not .* of torch.bfloat16"):
        draw(torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(1, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"settings are \[2, 5\] of float64, not \[1, 5\]"):
        draw(torch.zeros(2, 4), torch.zeros(1, 5, dtype=torch.float64))


@any_way
def test_rows_with_nan_are_left_to_the_reference() -> None:
    """Also if more tokens are requested than there are tokens without NaN."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    logits[0, 30:] = torch.nan
    settings = torch.tensor([(*setting, 0.4) for setting in (*SETTINGS, (1.0, 35, 1.0, 0.0))], dtype=torch.float64)
    rows = logits.expand(len(settings), -1)
    assert torch.equal(draw(rows, settings), reference.draw(rows, settings))

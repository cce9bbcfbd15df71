"""DRY ("don't repeat yourself"): a penalty on tokens that would continue a repetition.

If a token followed an earlier occurrence of the text's last n tokens, and n is at least `dry_allowed_length`, its logit
falls by `dry_multiplier * dry_base ** (n - dry_allowed_length)`. Breakers limit repetitions: n does not reach past the
last breaker, and a token that is a breaker has no penalty. The method is from pull request 5677 of
text-generation-webui, as llama.cpp's sampler computes it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Breakers: TypeAlias = Mapping[int, tuple[tuple[int, ...], ...]]
"""By the first token of a breaker: the sequences of its other tokens. A breaker of one token has ()."""

MAX_TAIL = 20
"""The most tokens of a breaker after its first, as in llama.cpp."""
LARGEST_LOG = 88.7228391
"""Of float32, which limits the penalty."""


def find_breakers(pieces: Sequence[bytes], texts: Sequence[str], encode: Callable[[str], list[int]]) -> Breakers:
    """Return the breakers of these texts: each token that contains a text, and each that ends with a text's beginning.

    `pieces`: the text of each token. `encode` returns the token ids of a text.
    """
    breakers: dict[int, tuple[tuple[int, ...], ...]] = {}
    parts = [(text.encode(), [(text[:i].encode(), text[i:]) for i in range(1, len(text))]) for text in texts]
    for id, piece in enumerate(pieces):
        tails = {() for text, _ in parts if text in piece} | {
            tuple(encode(rest)[:MAX_TAIL])
            for text, splits in parts
            for start, rest in splits
            if piece.endswith(start) and text not in piece
        }
        if tails:
            breakers[id] = tuple(sorted(tails))
    return breakers


def repetitions(token_ids: list[int], breakers: Breakers) -> dict[int, int]:
    """Return, for each token that followed an earlier occurrence of the last tokens, the longest such occurrence."""
    backwards = token_ids[::-1]
    limit, lengths, longest = _distance_to_breaker(backwards, breakers), _common_prefixes(backwards), dict[int, int]()
    for place in range(1, len(backwards)):
        length, token = min(lengths[place], limit), backwards[place - 1]
        if length > longest.get(token, 0):
            longest[token] = length
    return longest


def penalties(
    token_ids: list[int], breakers: Breakers, multiplier: float, base: float, allowed_length: int, last_n: int
) -> dict[int, float]:
    """Return the penalty of each token that has one. `last_n`: tokens that are searched; -1: all."""
    searched = token_ids if last_n == -1 else token_ids[len(token_ids) - min(last_n, len(token_ids)) :]
    most = LARGEST_LOG / math.log(base) if base > 1.000001 else math.inf
    return {
        token: multiplier * base ** min(length - allowed_length, most)
        for token, length in repetitions(searched, breakers).items()
        if length >= max(allowed_length, 1) and () not in breakers.get(token, ())
    }


def _distance_to_breaker(backwards: list[int], breakers: Breakers) -> int:
    """Return the number of tokens after the last breaker. `backwards`: the tokens, the last one first."""
    for place, token in enumerate(backwards):
        tails = [
            len(tail)
            for tail in breakers.get(token, ())
            if len(tail) <= place and tuple(backwards[place - len(tail) : place])[::-1] == tail
        ]
        if tails:
            return place - max(tails)
    return len(backwards)


def _common_prefixes(sequence: list[int]) -> list[int]:
    """Return how many elements from each place on equal the sequence's first elements (the Z algorithm)."""
    lengths, start, end = [0] * len(sequence), 0, 0
    for place in range(1, len(sequence)):
        length = min(lengths[place - start], end - place) if place < end else 0
        while place + length < len(sequence) and sequence[length] == sequence[place + length]:
            length += 1
        lengths[place] = length
        if place + length > end:
            start, end = place, place + length
    return lengths

"""Repeated n-grams: the index equals a search through all tokens, and reads two tokens per new token."""

import random

import pytest

from conf.decoding import MAX_NGRAM, DecodeConfig
from conf.errors import UserError
from pipelines.engine.ngrams import NgramIndex
from tests.helpers.cases import each
from tests.helpers.drafts import Counted


def followers(token_ids: list[int], size: int) -> set[int]:
    """Compute by definition."""
    last = token_ids[len(token_ids) - size + 1 :]
    starts = range(len(token_ids) - size + 1)
    return {token_ids[i + size - 1] for i in starts if token_ids[i : i + size - 1] == last}


@each("size", [1, 2, 3, 5, 40])
def test_it_says_what_a_search_says_while_sequences_grow_and_fork(size: int) -> None:
    rng, num_found = random.Random(size), 0
    branches = [(NgramIndex(size), [rng.randrange(3) for _ in range(60)]) for _ in range(3)]
    for _ in range(150):
        index, tokens = rng.choice(branches)
        if rng.random() < 0.1:  # one index continues as if the other did not exist
            branches.append((index.copy(), list(tokens)))
        start = rng.randrange(len(tokens) + 1)
        tokens += tokens[start : start + 60] if rng.random() < 0.1 else [rng.randrange(3)]
        assert set(index.followers(tokens)) == followers(tokens, size)
        num_found += bool(followers(tokens, size))
    assert num_found > 10


@each("size", [2, MAX_NGRAM])
def test_a_token_costs_two_reads_however_many_there_are(size: int) -> None:
    rng, index = random.Random(0), NgramIndex(size)
    tokens = Counted(rng.randrange(50) for _ in range(3000))
    index.followers(tokens)
    tokens.num_read = 0
    for _ in range(100):
        tokens.append(rng.randrange(50))
        index.followers(tokens)
    assert tokens.num_read == 200


def test_the_size_has_a_bound() -> None:
    assert DecodeConfig(no_repeat_ngram_size=MAX_NGRAM).no_repeat_ngram_size == 1024
    with pytest.raises(
        UserError, match=r"decode.no_repeat_ngram_size=1025 is not allowed: give a number from 0 to 1024"
    ):
        DecodeConfig(no_repeat_ngram_size=MAX_NGRAM + 1)

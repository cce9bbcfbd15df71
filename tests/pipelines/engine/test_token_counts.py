"""Counts of tokens for penalties: equal to a count of the whole text, with one read per new token."""

import random
from collections import Counter

import torch

from conf.decoding import DecodeConfig
from pipelines.engine.logits import process_logits
from pipelines.engine.request import ContextLimit, SamplingContext
from pipelines.engine.request_factory import resolve_sampling_params
from pipelines.engine.token_counts import TokenCounts
from tests.helpers.cases import each
from tests.helpers.drafts import Counted


def counted(counts: TokenCounts) -> dict[int, int]:
    assert len(set(counts.token_ids)) == len(counts.token_ids) == len(counts.counts)
    return dict(zip(counts.token_ids, counts.counts, strict=True))


@each("with_prompt", [False, True])
def test_it_says_what_a_count_says_while_sequences_grow_and_fork(with_prompt: bool) -> None:
    rng, prompt = random.Random(0), [3, 1, 3, 20]
    branches = [(TokenCounts(len(prompt), with_prompt), list(prompt)) for _ in range(3)]
    for _ in range(200):
        counts, tokens = rng.choice(branches)
        if rng.random() < 0.1:  # one count continues as if the other did not exist
            branches.append((counts.copy(), list(tokens)))
        tokens += rng.choices(range(15), k=rng.randrange(4))
        counts.update(tokens)
        generated = Counter(tokens[len(prompt) :])
        assert counted(counts) == {token: generated[token] for token in (tokens if with_prompt else generated)}


def context(prompt: list[int], output: list[int], **decode: object) -> SamplingContext:
    config = DecodeConfig(**{"max_new_tokens": 50, **decode}).resolved({})  # type: ignore[arg-type]
    params = resolve_sampling_params(config, len(prompt), ContextLimit(10**6, "limit"), frozenset())
    return SamplingContext(params, Counted(prompt + output), len(prompt))


@each("settings", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}])
def test_a_penalised_token_costs_one_read_however_many_there_are(settings: dict[str, float]) -> None:
    rng, logits = random.Random(0), torch.randn(1, 60)
    growing = context(rng.choices(range(50), k=3000), rng.choices(range(50), k=3000), **settings)
    process_logits(logits, [growing])
    assert isinstance(growing.token_ids, Counted)
    growing.token_ids.num_read = 0
    for _ in range(100):
        growing.token_ids.append(rng.randrange(60))
        process_logits(logits, [growing])
    assert growing.token_ids.num_read == 100
    again = SamplingContext(growing.params, list(growing.token_ids), growing.num_prompt_tokens)
    assert process_logits(logits, [growing]).equal(process_logits(logits, [again]))

"""PaddleNLP's verification compared with its description, in float64: hand-made rows, and whole texts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.decoding import DecodeConfig, warn_once
from conf.speculation import Acceptance, Speculate, SpeculationConfig
from pipelines.engine import Engine
from pipelines.engine.proposers import Proposer
from pipelines.engine.request import Sequence, SequenceGroup
from pipelines.engine.sampler import uniform
from pipelines.engine.scheduler import Scheduled
from pipelines.engine.thinking import Thinking, ThinkingLimit
from pipelines.engine.top_p_window import drawn, is_drafted_and_drawn, num_accepted, num_candidates, verified
from tests.helpers.builders import all_logits, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.scheduling import factory_of

LOSSY = {"adaptive": False, "acceptance": Acceptance.top_p_window}
IDS = [[7, 8, 9], [4, 5, 6], [1, 2, 3], [1, 2, 3]]


def test_candidates_reach_top_p_or_there_are_none() -> None:
    assert [num_candidates([0.5, 0.25, 0.125], p) for p in (0.3, 0.5, 0.6, 0.8, 0.875, 0.9)] == [1, 1, 2, 3, 3, 0]


@each(
    ("drafts", "counts", "window", "expected"),
    [
        ([7, 4, 1], [1, 1, 1, 1], 2, 3),  # all are candidates
        ([9, 6, 3], [3, 3, 3, 1], 2, 3),
        ([9, 6, 3], [3, 2, 3, 1], 2, 1),  # the second is not a candidate
        ([8, 4, 1], [1, 1, 1, 1], 2, 3),  # the second most likely, and a window of the most likely
        ([8, 5, 1], [1, 2, 1, 1], 2, 0),  # a candidate is not the most likely
        ([8, 4], [1, 1, 1], 2, 0),  # a window that the drafts do not fill
        ([8, 4, 2], [1, 1, 2, 1], 1, 2),  # nothing after the window is accepted
        ([9, 4, 1], [1, 1, 1, 1], 2, 0),  # the third most likely
        ([7, 4, 1], [0, 1, 1, 1], 2, 0),  # without candidates the most likely token is none, either
        ([8, 4, 1], [0, 1, 1, 1], 2, 3),
        ([], [1], 2, 0),
    ],
)
def test_drafts_stay_as_the_text_says(drafts: list[int], counts: list[int], window: int, expected: int) -> None:
    assert num_accepted(drafts, IDS, counts, window) == expected


def test_drafts_where_one_token_or_none_may_be_chosen() -> None:
    assert num_accepted([8, 4, 1], [[7], [4], [1], [2]], [1, 1, 1, 1], 2) == 0
    assert num_accepted([8, 4, 1], [[7, 8], [4], [], []], [1, 1, 0, 0], 2) == 0


def test_the_last_token_is_drawn_among_candidates() -> None:
    assert [drawn([7, 8, 9], [0.5, 0.25, 0.125], 2, number) for number in (0.0, 0.49, 0.51, 0.74)] == [7, 7, 8, 8]
    assert drawn([7, 8, 9], [0.5, 0.25, 0.125], 0, 0.6) == 7


def item_of(drafts: tuple[int, ...], **decode: Any) -> Scheduled:
    """Return an item for the prompt 1, 2 and the token 3, which is computed with these drafts."""
    speculation = SpeculationConfig(**LOSSY)
    settings = DecodeConfig(max_new_tokens=9, speculate=Speculate.ngram, speculation=speculation, **decode)
    sequence = Sequence.begin(factory_of(8, 64).make(0, [1, 2], settings))
    group = SequenceGroup(sequence.request, sequence, None)
    (sequence,) = group.sequences
    sequence.token_ids.append(3)
    sequence.num_computed_tokens = 2
    return Scheduled(group, sequence, 2, 1, 1, drafts)


def test_the_last_token_is_drawn_below_top_p() -> None:
    shares = [0.3, 0.25, 0.2, 0.15, 0.1]
    logits = torch.tensor([*shares, 1e-9, 1e-9, 1e-9]).log()[None]
    said = [verified(item_of((), temperature=1.0, top_p=0.5, seed=seed), logits) for seed in range(200)]
    assert said == [[0 if uniform(seed, 1) * 0.5 < 0.3 else 1] for seed in range(200)]


def test_drafts_count_for_the_following_tokens() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 5], logits[:, 6], logits[:, 7] = 30.0, 20.0, 10.0  # 5 is certain, then 6, then 7
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 1}
    assert verified(item_of((5, 5), **settings), logits) == [5, 5, 5]
    assert verified(item_of((5, 5), **settings, no_repeat_ngram_size=1), logits) == [5, 6]
    assert verified(item_of((5, 6), **settings, no_repeat_ngram_size=1), logits) == [5, 6, 7]
    limit = ThinkingLimit(2, b"", b")", (6, 4), lambda id: b"x")
    for drafts, expected in (((5, 5), [5, 6]), ((5, 6), [5, 6, 4]), ((6, 4), [5])):
        item = item_of(drafts, **settings)
        item.sequence.thinking = Thinking(limit, True, num_tokens=1)
        assert verified(item, logits) == expected


def test_only_the_last_part_of_a_text_is_verified() -> None:
    item = item_of((5,), temperature=1.0, seed=1)
    assert is_drafted_and_drawn(item)
    item.sequence.token_ids.append(4)  # as after a preemption, whose tokens are computed in parts
    assert not is_drafted_and_drawn(item)
    assert not is_drafted_and_drawn(item_of((5,), temperature=0.0))


class Likely(Proposer):
    """Drafts tokens of another engine's logits: mostly the most likely one, else the second or third."""

    RANKS = (0, 0, 1, 0, 0, 2, 0)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def draft(self, token_ids: list[int], most: int) -> list[int]:
        said = list(token_ids)
        for _ in range(most):
            likely = all_logits(self._engine, said)[-1].topk(3).indices.tolist()
            said.append(likely[self.RANKS[len(said) % len(self.RANKS)]])
        return said[len(token_ids) :]

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.draft(sequence.token_ids, most) for sequence, most in wanted]

    def learn(self, sequence: Sequence) -> None:
        pass


def by_the_text(engine: Engine, prompt: list[int], first: int, decode: DecodeConfig, proposer: Likely) -> list[int]:
    """Return tokens by paddlenlp's own description, from logits of whole texts."""
    settings, temperature, top_p = decode.speculation, decode.temperature or 1.0, decode.top_p or 1.0
    said = [first]
    most_tokens = int(decode.max_new_tokens or 0)
    while len(said) < most_tokens:
        drafts = proposer.draft(prompt + said, min(settings.num_tokens, most_tokens - len(said) - 1))
        logits = all_logits(engine, prompt + said + drafts)[-1 - len(drafts) :].double().numpy() / temperature
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        order = np.argsort(-probabilities, axis=-1)[:, : settings.max_candidates]
        lengths = []
        for row, ids in zip(probabilities, order, strict=True):
            reached = np.flatnonzero(np.cumsum(row[ids]) >= top_p)
            lengths.append(int(reached[0]) + 1 if len(reached) else 0)
        place = 0
        while place < len(drafts):
            if drafts[place] in order[place][: lengths[place]]:
                place += 1
                continue
            window = drafts[place + 1 : place + 1 + settings.verify_window]
            best = [int(order[place + 1 + i][0]) for i in range(len(window))]
            if drafts[place] in order[place][1:2] and len(window) == settings.verify_window and window == best:
                place += 1 + settings.verify_window
            break
        said += drafts[:place]
        number = uniform(decode.seed or 0, len(said)) * top_p
        ids = order[place][: lengths[place]]
        sums = np.cumsum(probabilities[place][ids])
        said.append(int(ids[np.searchsorted(sums, number)]) if len(ids) else int(order[place][0]))
    return said[:most_tokens]


QUICK: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.1, "verify_window": 1, "max_candidates": 1},  # the second most likely token is not used
]
LONG: list[dict[str, Any]] = [
    {"top_p": 0.5, "num_tokens": 4, "max_candidates": 8},
    {"top_p": 0.3, "verify_window": 1, "max_candidates": 3},
    {"top_p": 0.99, "max_candidates": 2},  # candidates that never reach top_p
    {"top_p": 0.95, "max_candidates": 64, "num_tokens": 15},
]


@pytest.mark.parametrize("settings", [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)], ids=str)
def test_texts_match_the_definition(chatty: Path, settings: dict[str, Any]) -> None:
    speculation = SpeculationConfig(**LOSSY, **{name: v for name, v in settings.items() if name != "top_p"})
    decode = DecodeConfig(max_new_tokens=24, ignore_eos=True, temperature=1.2, top_p=settings["top_p"], seed=11)
    engine = engine_of(chatty)
    prompts = [[0, 70, 71], [0, 90]]
    firsts = [
        output.completions[0].token_ids[0]
        for output in engine.generate(map(engine.request, range(2), prompts, [decode] * 2))
    ]
    lossy = replace(decode, speculate=Speculate.ngram, speculation=speculation)
    proposer = Likely(engine_of(chatty))
    engine.speculator.proposers[Speculate.ngram] = proposer
    outputs = engine.generate(engine.request(i, prompt, lossy) for i, prompt in enumerate(prompts))
    for output in sorted(outputs, key=lambda output: output.request_id):
        i = output.request_id
        expected = by_the_text(engine, prompts[i], firsts[i], lossy, proposer)
        assert output.completions[0].token_ids == expected
    drafted, accepted = engine.speculator.counts
    assert 0 < accepted < drafted


def test_greedy_rows_stay_exact(chatty: Path) -> None:
    engine = engine_of(chatty)
    greedy = DecodeConfig(max_new_tokens=30, ignore_eos=True)
    (plain,) = engine.generate([engine.request(0, [0, 70], greedy)])
    engine.speculator.proposers[Speculate.ngram] = Likely(engine_of(chatty))
    lossy = replace(greedy, speculate=Speculate.ngram, speculation=SpeculationConfig(**LOSSY))
    (output,) = engine.generate([engine.request(0, [0, 70], lossy)])
    assert output.completions == plain.completions


class Fixed(Proposer):
    def __init__(self, draft: list[int]) -> None:
        self._draft = draft

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft for _ in wanted]


def test_a_token_that_may_not_be_chosen_is_not_the_second_most_likely(tmp_path: Path) -> None:
    write_llama(tmp_path, vocab_size=2, bos_token_id=None)
    engine = engine_of(tmp_path)
    engine.speculator.proposers[Speculate.ngram] = Fixed([1, 0, 0])
    speculation = SpeculationConfig(**LOSSY)
    decode = DecodeConfig(max_new_tokens=9, temperature=1.0, allowed_token_ids=[0], seed=1)
    (output,) = engine.generate(
        [engine.request(0, [1], replace(decode, speculate=Speculate.ngram, speculation=speculation))]
    )
    assert output.completions[0].token_ids == [0] * 9
    assert engine.speculator.counts.num_drafted_tokens > 0


def test_limits_that_candidates_replace_are_said(chatty: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    engine = engine_of(chatty)
    decode = DecodeConfig(temperature=1.0, top_k=5, speculate=Speculate.ngram, speculation=SpeculationConfig(**LOSSY))
    engine.request(0, [0], decode)
    assert (
        "decode.top_k=5 is used for the first token alone with decode.speculation.acceptance=top_p_window"
        in caplog.text
    )

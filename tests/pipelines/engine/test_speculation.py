"""Rows with drafts compared with the same rows without: tokens, texts, log probabilities and cached blocks must be
equal."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.decoding import DecodeConfig, warn_once
from conf.speculation import DraftOrder, Speculate, SpeculationConfig
from conf.thinking import ThinkingConfig
from pipelines.engine import Engine
from pipelines.engine.lookahead import LaunchedStep
from pipelines.engine.request import Output, SequenceGroup
from pipelines.engine.scheduler import StepPlan
from tests.helpers import drafts
from tests.helpers.builders import KEY_VALUE_BYTES, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.drafts import DRAWN, EOS, GREEDY, Hostile, at_random, devices
from tests.helpers.tiers import in_turn, tiers

PROMPTS = [[0, 70 + i, 9, 4] * (i + 1) for i in range(6)]
SETTINGS = {
    **drafts.SETTINGS,
    "min_new_tokens": replace(DRAWN, min_new_tokens=5),
    "bias": replace(DRAWN, logit_bias={EOS: 4.0, 80: 3.0}),
    "last token": replace(GREEDY, max_new_tokens=1),
    "reasoning": replace(
        DRAWN, thinking=ThinkingConfig(max_tokens=3, start="e", closing="</think>\n", is_open=True), n=2
    ),
}
DEVICES = devices(22 * 4 * KEY_VALUE_BYTES)


RIGHT: dict[str, Callable[[int], bool]] = {
    "all right": lambda place: True,
    "all wrong": lambda place: False,
    "one wrong": lambda place: place != 2,
    "random": at_random(0.7),
}


def run(engine: Engine, decode: DecodeConfig) -> list[Output]:
    """Return all results of each request. Checks the blocks after every step, and that all are free at the end."""
    requests = [engine.request(i, prompt, decode) for i, prompt in enumerate(PROMPTS)]
    outputs = list(engine.generate(requests, on_step=engine.scheduler.check_integrity))
    blocks = engine.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks
    return [
        replace(output, num_cached_tokens=0, num_preemptions=0)
        for output in sorted(outputs, key=lambda output: output.request_id)
    ]


def drafted(decode: DecodeConfig, **speculation: Any) -> DecodeConfig:
    return replace(
        decode, speculate=Speculate.ngram, speculation=SpeculationConfig(**{"adaptive": False, **speculation})
    )


def hostile(engine: Engine, known: list[Output], right: Callable[[int], bool]) -> Engine:
    tokens = {(output.request_id, i): c.token_ids for output in known for i, c in enumerate(output.completions)}
    engine.speculator.proposers[Speculate.ngram] = Hostile(tokens, right)
    return engine


@pytest.fixture(scope="module")
def plain(chatty: Path) -> Callable[[str], list[Output]]:
    """Return the results of each of SETTINGS without drafts, with enough memory."""
    known: dict[str, list[Output]] = {}

    def outputs(setting: str) -> list[Output]:
        if setting not in known:
            known[setting] = run(engine_of(chatty, tokenizer=""), SETTINGS[setting])
        return known[setting]

    return outputs


# Every way to be wrong, on every device, with the settings in turn. The property below combines them with arbitrary
# step splits.
CHOSEN = [(setting, *place) for place, setting in in_turn(itertools.product(DEVICES, RIGHT), SETTINGS)]


@pytest.mark.parametrize(("setting", "device", "right"), tiers(itertools.product(SETTINGS, DEVICES, RIGHT), CHOSEN))
def test_drafts_change_nothing(
    chatty: Path,
    plain: Callable[[str], list[Output]],
    setting: str,
    device: str,
    right: str,
    preempted: list[SequenceGroup],
) -> None:
    expected, decode = plain(setting), drafted(SETTINGS[setting])
    engine = hostile(engine_of(chatty, tokenizer="", **DEVICES[device]), expected, RIGHT[right])
    assert run(engine, decode) == expected
    assert run(engine, decode) == expected  # with the prefix cache of the first time
    assert preempted or device != "preemption" or setting not in ("greedy", "three samples")
    counts = engine.speculator.counts
    assert (counts.num_drafted_tokens > 0) == (setting != "last token")
    if (right, setting) == ("all right", "greedy"):
        assert counts.num_accepted_tokens == counts.num_drafted_tokens
    assert right != "all wrong" or counts.num_accepted_tokens == 0


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    setting=st.sampled_from([name for name in SETTINGS if name != "last token"]),
    chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    speculation=st.fixed_dictionaries({"num_tokens": st.integers(1, 15), "adaptive": st.booleans()}),
    block_size=st.integers(1, 9),
    budget=st.integers(9, 40),
    num_tokens=st.integers(110, 400),
    batch_size=st.integers(1, 6),
)
def test_drafts_change_nothing_wherever_steps_are_cut(
    chatty: Path,
    plain: Callable[[str], list[Output]],
    setting: str,
    chance: float,
    speculation: dict[str, Any],
    block_size: int,
    budget: int,
    num_tokens: int,
    batch_size: int,
) -> None:
    memory = -(-num_tokens // block_size) * block_size * KEY_VALUE_BYTES
    device = {"block_size": block_size, "max_batched_tokens": budget, "kv_cache_memory": str(memory)}
    engine = engine_of(chatty, batch_size=batch_size, tokenizer="", **device)
    expected = plain(setting)
    assert run(hostile(engine, expected, at_random(chance)), drafted(SETTINGS[setting], **speculation)) == expected


ORDERS, ADAPTIVE = ("longest", "paddle"), (False, True)


@pytest.mark.parametrize(
    ("setting", "order", "adaptive"),
    tiers(itertools.product(SETTINGS, ORDERS, ADAPTIVE), in_turn(SETTINGS, ORDERS, ADAPTIVE)),
)
def test_copied_drafts_change_nothing(
    chatty: Path, plain: Callable[[str], list[Output]], setting: str, order: str, adaptive: bool
) -> None:
    engine, expected = engine_of(chatty, tokenizer=""), plain(setting)
    decode = drafted(SETTINGS[setting], adaptive=adaptive, order=DraftOrder[order], min_ngram=1)
    assert run(engine, decode) == expected
    assert run(engine, decode) == expected  # with drafts from the rows of the first time
    if (setting, order, adaptive) == ("greedy", "longest", False):
        assert engine.speculator.counts.num_accepted_tokens > 0


@each("right", RIGHT)
def test_a_stop_string_among_drafts_ends_the_row_where_it_does_without(
    chatty: Path, plain: Callable[[str], list[Output]], right: str
) -> None:
    known = plain("greedy")
    texts = [output.completions[0].text or "" for output in known]
    decode = replace(GREEDY, stop=[text[len(text) // 2 :][:2] for text in texts])
    expected = run(engine_of(chatty, tokenizer=""), decode)
    assert all(output.completions[0].stop_reason in decode.stop for output in expected)
    assert run(hostile(engine_of(chatty, tokenizer=""), known, RIGHT[right]), drafted(decode)) == expected


@each("right", RIGHT)
def test_pieces_arrive_as_they_do_without(chatty: Path, plain: Callable[[str], list[Output]], right: str) -> None:
    def pieces(engine: Engine, decode: DecodeConfig) -> dict[tuple[int, int], list[Any]]:
        got: dict[tuple[int, int], list[Any]] = {}
        for i, prompt in enumerate(PROMPTS):

            def sink(sample: int, *piece: Any, row: int = i) -> None:
                got.setdefault((row, sample), []).append(piece)

            engine.add(engine.request(i, prompt, decode, sink))
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.step()
        return got

    decode = SETTINGS["three samples"]
    expected = pieces(engine_of(chatty, tokenizer=""), decode)
    assert len(expected) == 3 * len(PROMPTS)
    engine = hostile(engine_of(chatty, tokenizer=""), plain("three samples"), RIGHT[right])
    assert pieces(engine, drafted(decode)) == expected


@each("right", ["all right", "random"])
def test_remembered_blocks_match_a_plain_run(chatty: Path, plain: Callable[[str], list[Output]], right: str) -> None:
    def remembered(engine: Engine) -> set[bytes]:
        return set(engine.scheduler.block_manager._block_of)

    without = engine_of(chatty, tokenizer="", block_size=2)
    engine = hostile(engine_of(chatty, tokenizer="", block_size=2), plain("drawn"), RIGHT[right])
    assert run(without, DRAWN) == run(engine, drafted(DRAWN))
    assert remembered(engine) == remembered(without)
    followed = [
        [*prompt, *output.completions[0].token_ids, 7] for prompt, output in zip(PROMPTS, plain("drawn"), strict=True)
    ]
    for i, prompt in enumerate(followed):  # a later prompt reads the content of the blocks
        for either in (without, engine):
            either.add(either.request(i, prompt, GREEDY))
    for either in (without, engine):
        groups = [*either.scheduler.waiting]
        while either.scheduler.running or either.scheduler.waiting:
            either.step()
        assert all(group.num_cached_tokens for group in groups)
        assert [g.output().completions for g in groups] == [c.completions for c in _alone(chatty, followed)]


def _alone(folder: Path, prompts: list[list[int]]) -> list[Output]:
    engine = engine_of(folder, tokenizer="")
    requests = [engine.request(i, prompt, replace(GREEDY, prefix_cache=False)) for i, prompt in enumerate(prompts)]
    return sorted(engine.generate(requests), key=lambda output: output.request_id)


def test_an_overflow_in_a_rejected_draft_is_not_an_error(
    chatty: Path, plain: Callable[[str], list[Output]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Engine._launch

    def overflowing(self: Engine, plan: StepPlan, last_tokens: torch.Tensor | None = None) -> LaunchedStep:
        step = launch(self, plan, last_tokens)
        for item, first in zip(plan.scheduled, step.first_rows, strict=True):
            rows = slice(first + item.num_outputs, first + item.num_outputs + len(item.drafts))
            step.outputs.logits[rows] = torch.nan
            step.outputs.finite[rows] = False
        return step

    monkeypatch.setattr(Engine, "_launch", overflowing)
    engine = hostile(engine_of(chatty, tokenizer=""), plain("drawn"), RIGHT["all wrong"])
    assert run(engine, drafted(DRAWN)) == plain("drawn")
    assert engine.speculator.counts.num_drafted_tokens > 0
    failed = run(hostile(engine_of(chatty, tokenizer=""), plain("drawn"), RIGHT["all right"]), drafted(DRAWN))
    assert all("not finite" in str(output.error) or "NaN" in str(output.error) for output in failed)


def test_drafts_of_unfinished_steps_are_not_counted_as_accepted(
    chatty: Path, plain: Callable[[str], list[Output]]
) -> None:
    """A sink that raises ends the step. Drafts that were already tokens stay, and the remaining ones are computed
    again."""
    engine = hostile(engine_of(chatty, tokenizer=""), plain("greedy"), RIGHT["all right"])
    told = 0

    def sink(*_: Any) -> None:
        nonlocal told
        told += 1
        if told == 4:
            raise RuntimeError("the reader has gone")

    def finish(group: SequenceGroup) -> None:
        while group.sequences:
            engine.step()

    group = engine.add(engine.request(0, PROMPTS[0], drafted(GREEDY), sink))
    with pytest.raises(RuntimeError, match="the reader has gone"):
        finish(group)
    assert engine.speculator.counts == (7, 2)
    finish(group)
    assert group.output().completions == plain("greedy")[0].completions
    drafted_tokens, accepted_tokens = engine.speculator.counts
    assert drafted_tokens - accepted_tokens == 5
    engine.scheduler.check_integrity()


def test_searches_are_not_drafted(chatty: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()  # another test of this process may have logged the warning
    engine = engine_of(chatty, tokenizer="")
    for search in ({"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 3}):
        decode = DecodeConfig(max_new_tokens=6, **search)  # type: ignore[arg-type]
        assert run(engine, drafted(decode)) == run(engine, decode)
        (name, value), *_ = search.items()
        text = f"decode.speculate=ngram is not used with decode.{name}={value}, whose candidates compete"
        assert caplog.text.count(text) == 1
    assert engine.speculator.counts.num_drafted_tokens == 0


def test_tokens_match_transformers_prompt_lookup(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    engine = engine_of(tmp_path)
    decode = drafted(DecodeConfig(max_new_tokens=40, ignore_eos=True), num_tokens=3, min_ngram=1, max_ngram=2)
    for prompt in ([5, 9, 4, 5, 9], [7, 8], [30, 31] * 5):
        (output,) = engine.generate([engine.request(0, prompt, decode)])
        expected = model.generate(
            torch.tensor([prompt]),
            prompt_lookup_num_tokens=3,
            max_matching_ngram_size=2,
            do_sample=False,
            max_new_tokens=40,
        )
        assert prompt + output.completions[0].token_ids == expected[0].tolist()
    assert engine.speculator.counts.num_accepted_tokens > 0

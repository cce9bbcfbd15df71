"""An engine with a step of lookahead compared with one without, on the CPU, where a launched step is computed at
once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from kernels import build
from pipelines.engine import Engine
from pipelines.engine.lookahead import LaunchedStep
from pipelines.engine.request import SequenceGroup
from tests.helpers.builders import KEY_VALUE_BYTES, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.observed_steps import look_ahead, pad

NEEDS_KERNELS = pytest.mark.skipif(
    build.library() is None, reason="torch's operators sum a chunk in another order, which shows in log probabilities"
)
PROMPTS = [[3 + i] * (3 * i + 1) for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def run(engine: Engine, decodes: list[DecodeConfig]) -> list[Any]:
    """Return all results of every request, with alternating settings. Checks the blocks after every step, and that all
    are free at the end."""
    requests = [engine.request(i, prompt, decodes[i % len(decodes)]) for i, prompt in enumerate(PROMPTS)]
    outputs = list(engine.generate(requests, on_step=engine.scheduler.check_integrity))
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    return [replace(output, num_cached_tokens=0) for output in sorted(outputs, key=lambda output: output.request_id)]


GREEDY = DecodeConfig(max_new_tokens=11, ignore_eos=True)
LONG = DecodeConfig(max_new_tokens=25, ignore_eos=True)
SHORT = DecodeConfig(max_new_tokens=3, ignore_eos=True)  # settings with which no step looks ahead
DRAWN = DecodeConfig(max_new_tokens=9, temperature=1.3, top_p=0.9, top_k=20, seed=5)

PENALISED = replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
BANNED = replace(DRAWN, allowed_token_ids=[7], stop_token_ids=[7], min_new_tokens=2)  # its first token is none


@pytest.mark.long
@pytest.mark.parametrize(
    "decodes",
    [
        [GREEDY],
        [DRAWN],
        [
            GREEDY,
            replace(DRAWN, max_new_tokens=5),
            replace(GREEDY, max_new_tokens=1),
            replace(GREEDY, min_new_tokens=3),
        ],
        pytest.param(
            [
                LONG,
                replace(SHORT, logprobs=2),
                replace(SHORT, temperature=1.0, seed=3, n=2),
                replace(SHORT, num_beams=2),
            ],
            marks=NEEDS_KERNELS,
        ),
        pytest.param(
            [GREEDY, replace(SHORT, no_repeat_ngram_size=2), replace(SHORT, prompt_logprobs=1)], marks=NEEDS_KERNELS
        ),
        [
            PENALISED,
            DRAWN,
            BANNED,
            replace(PENALISED, temperature=0.0, top_p=None, top_k=None, logit_bias={3: 2.0, 9: -1.5}),
            GREEDY,
        ],
    ],
    ids=["greedy", "drawn", "lengths", "with others", "with n-grams", "with penalties"],
)
@each("device", [{}, {"block_size": 1}, {"block_size": 4, "max_batched_tokens": 7}])
def test_the_same_outputs(folder: Path, decodes: list[DecodeConfig], device: dict[str, Any]) -> None:
    expected = run(engine_of(folder, **device), decodes)
    engine = engine_of(folder, **device)
    ahead = look_ahead(engine)
    assert run(engine, decodes) == expected
    assert run(engine, decodes) == expected  # with the prefix cache of the first time
    assert any(ahead)


@each("device", [{}, {"block_size": 1}])
def test_rows_that_stop_in_the_middle(folder: Path, device: dict[str, Any]) -> None:
    """Results after a stop are dropped, also if they would fill a block, and the other rows continue."""
    free = [output.completions[0].token_ids for output in run(engine_of(folder), [DRAWN])]
    stops = [replace(DRAWN, stop_token_ids=[tokens[i % 7]]) for i, tokens in enumerate(free)]
    expected = run(engine_of(folder), stops)
    assert len({len(output.completions[0].token_ids) for output in expected}) > 3
    engine = engine_of(folder, **device)
    ahead = look_ahead(engine)
    assert run(engine, stops) == expected
    assert any(ahead)


def test_preempted_rows(folder: Path, preempted: list[SequenceGroup]) -> None:
    """A pool for slightly more than the longest row: a plan that must preempt is made after all tokens are known."""
    device = {"block_size": 4, "kv_cache_memory": str(11 * 4 * KEY_VALUE_BYTES)}
    decodes = [replace(GREEDY, max_new_tokens=20), replace(DRAWN, max_new_tokens=20)]
    expected = run(engine_of(folder), decodes)
    engine = engine_of(folder, **device)
    ahead = look_ahead(engine)
    assert run(engine, decodes) == expected
    assert preempted
    assert any(ahead)


def test_padded_steps_take_tokens_from_the_device(folder: Path) -> None:
    expected = run(engine_of(folder), [GREEDY, DRAWN])
    engine = engine_of(folder)
    shapes, ahead = pad(engine, 4), look_ahead(engine)
    assert run(engine, [GREEDY, DRAWN]) == expected
    assert {1, 2, 4} >= {shape.num_sequences for shape in shapes}
    assert any(ahead)


def test_a_step_begins_before_the_last_ones_tokens_are_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = engine_of(folder), []
    execute, wait = engine.executor.execute, LaunchedStep.wait
    engine.looks_ahead = True
    monkeypatch.setattr(engine.executor, "execute", lambda *args: (events.append("launch"), execute(*args))[1])
    monkeypatch.setattr(LaunchedStep, "wait", lambda step: (events.append("wait"), wait(step))[1])
    list(engine.generate([engine.request(0, [3, 4], replace(GREEDY, max_new_tokens=4))]))
    assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


@each(
    "settings",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3},
        {"logit_bias": {5: 3.0}, "allowed_token_ids": [5, 6, 7, 8]},
        {"min_new_tokens": 5, "stop_token_ids": [5, 6]},
    ],
)
@each("decode", [GREEDY, DRAWN])
def test_no_step_waits_for_penalties_and_bans(folder: Path, decode: DecodeConfig, settings: dict[str, Any]) -> None:
    decode = replace(decode, max_new_tokens=8, **settings)
    prompt = [5, 6, 7, 5]
    (expected,) = engine_of(folder).generate([engine_of(folder).request(0, prompt, decode)])
    (plain,) = engine_of(folder).generate([engine_of(folder).request(0, prompt, replace(DRAWN, max_new_tokens=8))])
    engine = engine_of(folder)
    ahead = look_ahead(engine)
    (output,) = engine.generate([engine.request(0, prompt, decode)])
    assert output == expected != plain
    assert ahead == [False] + [True] * (len(ahead) - 1)
    assert len(ahead) >= len(output.completions[0].token_ids)


def test_a_request_that_comes_while_a_step_is_ahead(folder: Path) -> None:
    expected = run(engine_of(folder, batch_size=8), [GREEDY])
    engine = engine_of(folder, batch_size=8)
    ahead = look_ahead(engine)
    groups = []
    for i, prompt in enumerate(PROMPTS):
        groups.append(engine.add(engine.request(i, prompt, GREEDY)))
        for _ in range(3):
            engine.step()
            engine.scheduler.check_integrity()
    while any(group.sequences for group in groups):
        engine.step()
    assert [group.completions[0] for group in groups] == [output.completions[0] for output in expected]
    assert any(ahead)


def test_a_cancelled_row_affects_no_other_row(folder: Path) -> None:
    expected = run(engine_of(folder), [GREEDY])
    engine = engine_of(folder)
    look_ahead(engine)
    kept, cancelled = (engine.add(engine.request(i, PROMPTS[i], GREEDY)) for i in range(2))
    for _ in range(4):
        engine.step()
    engine.scheduler.cancel(cancelled)
    while kept.sequences:
        engine.step()
        engine.scheduler.check_integrity()
    assert kept.completions[0] == expected[0].completions[0]
    assert run(engine, [GREEDY]) == expected  # the launched next step does not disturb other rows


def test_damaged_weights_are_found(folder: Path) -> None:
    engine = engine_of(folder)
    look_ahead(engine)
    source = engine.generate([engine.request(0, [3, 4, 5], GREEDY)], on_step=lambda: norm.weight.data.fill_(torch.inf))  # type: ignore[union-attr, operator]
    norm = engine.executor.model.get_submodule("model.norm")
    (output,) = source
    assert "the model's logits are not finite" in str(output.error)
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks

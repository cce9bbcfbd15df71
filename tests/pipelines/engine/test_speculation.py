"""Rows with drafts against the same rows without: not a token, a log probability or a remembered block may differ."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.decoding import DecodeConfig
from conf.speculation import Speculate, SpeculationConfig
from pipelines.engine import Engine
from pipelines.engine.request import Output, Sequence, SequenceGroup
from tests.helpers.builders import engine_of, write_llama

PROMPTS = [[3 + i, 9, 4] * (2 * i + 1) for i in range(6)]
KEY_VALUE_BYTES = 2 * 2 * 2 * 16 * 4  # of a token: keys and values, layers, heads, channels, float32
GREEDY = DecodeConfig(max_new_tokens=23, ignore_eos=True)
DRAWN = DecodeConfig(max_new_tokens=17, temperature=1.3, top_p=0.9, top_k=20, seed=5)
SETTINGS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "penalties": replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    "three samples": replace(DRAWN, n=3),
    "n-grams": replace(GREEDY, no_repeat_ngram_size=2),
    "logprobs": replace(DRAWN, logprobs=3, prompt_logprobs=1),
    "min_new_tokens": replace(DRAWN, min_new_tokens=5),
    "last token": replace(GREEDY, max_new_tokens=1),
}
DEVICES = {
    "roomy": {},
    "one block a token": {"block_size": 1},
    "chunks": {"block_size": 4, "max_batched_tokens": 7},
    "preemption": {"block_size": 4, "kv_cache_memory": str(24 * 4 * KEY_VALUE_BYTES)},
}


class Hostile:
    """Drafts what follows in the plain run, spoilt at random places, longer than asked for and beyond the end."""

    def __init__(self, known: list[Output], right: float) -> None:
        self._known = {output.request_id: output for output in known}
        self._right = right
        self._random = random.Random(1)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft(sequence) for sequence, _ in wanted]

    def _draft(self, sequence: Sequence) -> list[int]:
        completion = self._known[sequence.request.id].completions[sequence.sample]
        right = [*completion.token_ids[sequence.num_output_tokens :], *range(3, 12)]
        return [token if self._random.random() < self._right else self._random.randrange(3, 90) for token in right]

    def learn(self, sequence: Sequence) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def run(engine: Engine, decode: DecodeConfig) -> list[Output]:
    """Everything that is said of each request. Blocks add up after every step, and at the end all are free."""
    requests = [engine.request(i, prompt, decode) for i, prompt in enumerate(PROMPTS)]
    outputs = list(engine.generate(requests, on_step=engine.scheduler.check_integrity))
    blocks = engine.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks
    return [replace(output, num_cached_tokens=0) for output in sorted(outputs, key=lambda output: output.request_id)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_drafts_change_nothing(
    folder: Path, setting: str, device: str, right: float, preempted: list[SequenceGroup]
) -> None:
    decode = SETTINGS[setting]
    expected = run(engine_of(folder), decode)
    engine = engine_of(folder, **DEVICES[device])
    engine.speculator.proposers[Speculate.ngram] = Hostile(expected, right)
    drafted = replace(decode, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=False))
    assert run(engine, drafted) == expected
    assert run(engine, drafted) == expected  # over what the prefix cache knows from the first time
    if decode.max_new_tokens != 1:
        assert engine.speculator.num_drafted_tokens > 0
        assert (engine.speculator.num_accepted_tokens > 0) == (right > 0) or right == 0.0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("adaptive", [True, False])
def test_copied_drafts_change_nothing(folder: Path, setting: str, adaptive: bool) -> None:
    decode = SETTINGS[setting]
    expected = run(engine_of(folder), decode)
    engine = engine_of(folder)
    drafted = replace(decode, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=adaptive, min_ngram=1))
    assert run(engine, drafted) == expected
    assert run(engine, drafted) == expected  # with drafts from the rows of the first time


def remembered(engine: Engine) -> set[Any]:
    """Hashes of the blocks that a later prompt would find."""
    return set(engine.scheduler.block_manager._block_of)


@pytest.mark.parametrize("right", [1.0, 0.5])
def test_remembered_blocks_are_those_of_a_plain_run(folder: Path, right: float) -> None:
    plain = engine_of(folder, block_size=2)
    expected = run(plain, DRAWN)
    engine = engine_of(folder, block_size=2)
    engine.speculator.proposers[Speculate.ngram] = Hostile(expected, right)
    run(engine, replace(DRAWN, speculate=Speculate.ngram, speculation=SpeculationConfig(adaptive=False)))
    assert remembered(engine) == remembered(plain)

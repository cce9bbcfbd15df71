"""Shared by tests of drafts: a proposer that knows the tokens of the plain run and spoils some of them, and
settings."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from conf.decoding import DecodeConfig
from pipelines.engine.proposers import Proposer
from pipelines.engine.request import Sequence

EOS = 1
PROMPTS = [[3 + i, 9, 4] * (2 * i + 1) for i in range(6)]
GREEDY = DecodeConfig(max_new_tokens=23, ignore_eos=True)
DRAWN = DecodeConfig(max_new_tokens=17, temperature=1.3, top_p=0.9, top_k=20, seed=5)
SETTINGS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "penalties": replace(DRAWN, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
    "three samples": replace(DRAWN, n=3),
    "n-grams": replace(GREEDY, no_repeat_ngram_size=2),
    "log probabilities": replace(DRAWN, logprobs=3, prompt_logprobs=1),
}


def devices(cache_bytes: int) -> dict[str, dict[str, Any]]:
    """Fields of DeviceConfig by name. `cache_bytes`: size of a KV cache in which rows are preempted."""
    return {
        "roomy": {},
        "one block a token": {"block_size": 1},
        "chunks": {"block_size": 4, "max_batched_tokens": 7},
        "preemption": {"block_size": 4, "kv_cache_memory": str(cache_bytes)},
    }


class Hostile(Proposer):
    """Drafts that follow the plain run, longer than requested and beyond its end, with wrong tokens among them,
    including the eos."""

    def __init__(self, known: Mapping[tuple[int, int], list[int]], right: Callable[[int], bool]) -> None:
        """`known`: tokens of the plain run by request and sample. `right(place)`: whether the draft at this position is
        right."""
        self._known = known
        self._right = right
        self._random = random.Random(1)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft(sequence) for sequence, _ in wanted]

    def _draft(self, sequence: Sequence) -> list[int]:
        said = self._known[sequence.request.id, sequence.sample]
        follows = [*said[sequence.num_output_tokens :], *range(3, 12)]
        return [token if self._right(place) else self._wrong(token) for place, token in enumerate(follows)]

    def _wrong(self, token: int) -> int:
        return EOS if token != EOS and self._random.random() < 0.3 else (token + self._random.randrange(1, 90)) % 91


def at_random(chance: float) -> Callable[[int], bool]:
    """Each position is right with this probability."""
    generator = random.Random(2)
    return lambda place: generator.random() < chance


class Counted(list[int]):
    """Tokens that count how often an element is read."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        assert isinstance(key, int), "a slice reads many"
        self.num_read += 1
        return super().__getitem__(key)

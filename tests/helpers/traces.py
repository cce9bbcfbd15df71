"""Seeded traces of requests, and the share of their prompt tokens that a scheduler finds in its prefix cache."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from models.capabilities import ModelCapabilities
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.kv_cache import CacheRoom, choose_sizes
from pipelines.engine.scheduler import Scheduler
from pipelines.engine.snapshots import MIN_TOKENS
from pipelines.engine.state_manager import StateManager
from tests.helpers.scheduling import sequence

BLOCK_SIZE, BUDGET, RUNNING = 16, 2048, 4
TURN_END = 1
HEADER = [2, 3, 4]
"""The tokens before an answer."""


class Turn(NamedTuple):
    prompt: list[int]
    output: list[int]


def tokens(rng: random.Random, median: int, most: int) -> list[int]:
    """Return new tokens, as many as a log-normal distribution says."""
    return [rng.randrange(10, 2**40) for _ in range(min(most, int(median * rng.lognormvariate(0, 0.7)) + 1))]


def chat(num_requests: int, seed: int, reasoning: int = 0) -> Iterator[Turn]:
    """Up to 16 conversations at a time continue in random order; each ends after a random number of turns.

    `reasoning`: median number of tokens before an answer that later prompts lack.
    """
    rng = random.Random(seed)
    systems = [[*tokens(rng, 800, 3000), TURN_END] for _ in range(4)]
    histories = list[list[int]]()
    for _ in range(num_requests):
        if len(histories) < 16 and rng.random() < 0.1 or not histories:
            histories.append(list(rng.choice(systems)))
        history = rng.choice(histories)
        history += [*tokens(rng, 90, 2000), TURN_END, *HEADER]
        thoughts, answer = tokens(rng, reasoning, 2000) if reasoning else [], [*tokens(rng, 150, 1000), TURN_END]
        yield Turn(list(history), thoughts + answer)
        history += answer
        if rng.random() < 1 / 20 or len(history) > 16_000:
            histories.remove(history)


def shared_systems(num_requests: int, seed: int) -> Iterator[Turn]:
    """Questions of one turn behind 60 system prompts, of which the first ones are asked more often."""
    rng = random.Random(seed)
    systems = [[*tokens(rng, 1500, 6000), TURN_END] for _ in range(60)]
    for _ in range(num_requests):
        system = systems[min(59, int(rng.paretovariate(0.6)) - 1)]
        yield Turn([*system, *tokens(rng, 200, 1000), TURN_END, *HEADER], [*tokens(rng, 150, 600), TURN_END])


TRACES = {
    "chat": lambda num_requests: chat(num_requests, 0),
    "chat, reasoning dropped": lambda num_requests: chat(num_requests, 1, reasoning=200),
    "shared system prompts": lambda num_requests: shared_systems(num_requests, 2),
}


def scheduler_of_memory(memory: int, token_bytes: int, slot_bytes: int) -> Scheduler:
    """Return a scheduler whose blocks and slots fill `memory` bytes. `slot_bytes`: 0 without recurrent layers."""
    rooms = [CacheRoom(memory, token_bytes, slot_bytes)]
    num_blocks, num_slots = choose_sizes(rooms, BLOCK_SIZE, 0, StateManager.num_needed(RUNNING), str(memory))
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    states = StateManager(num_slots, saves_outputs=slot_bytes < MIN_TOKENS * token_bytes)
    assert num_blocks * BLOCK_SIZE * token_bytes + num_slots * slot_bytes <= memory
    return Scheduler(blocks, RUNNING, BUDGET, ModelCapabilities(), None, states, {TURN_END})


def hit_rate(scheduler: Scheduler, turns: Iterator[Turn]) -> float:
    """Return cached tokens over prompt tokens. A request begins when another one ends; outputs grow by whole blocks."""
    num_cached = num_tokens = 0
    outputs = dict[Any, list[int]]()
    for id, turn in enumerate(turns):
        group = sequence(id, turn.prompt, len(turn.output))
        outputs[group] = list(turn.output)
        scheduler.add(group)
        num_tokens += len(turn.prompt)
        while len(scheduler.running) + len(scheduler.waiting) == RUNNING:
            num_cached += _step(scheduler, outputs)
        if id % 16 == 0:  # each check visits all blocks
            scheduler.check_integrity()
    while scheduler.running or scheduler.waiting:
        num_cached += _step(scheduler, outputs)
    blocks, states = scheduler.block_manager, scheduler.state_manager
    assert (blocks.num_free_blocks, states.num_free_slots) == (blocks.num_blocks, states.num_slots)
    return num_cached / num_tokens


def _step(scheduler: Scheduler, outputs: dict[Any, list[int]]) -> int:
    plan = scheduler.plan()
    scheduler.commit(plan)
    num_cached = 0
    for group in plan.ready:
        (row,), output = group.sequences, outputs[group]
        if not output:
            num_cached += group.num_cached_tokens or 0
            scheduler.finish(group, row)
            continue
        count = BLOCK_SIZE - len(row.token_ids) % BLOCK_SIZE
        row.token_ids += output[:count]
        del output[:count]
    return num_cached

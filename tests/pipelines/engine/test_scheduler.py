"""Scheduler: first come, first served; prompts in chunks that stall nobody; preemption; blocks that add up after every step."""

import random

import pytest

from conf.schema import DecodeConfig
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import ContextLimit, Request, Sequence, resolve_sampling_params
from pipelines.engine.scheduler import Scheduler


def sequence(id: int, prompt: list[int] | int, max_new_tokens: int = 5, prefix_cache: bool = True) -> Sequence:
    tokens = [id * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    decode = DecodeConfig(max_new_tokens=max_new_tokens, prefix_cache=prefix_cache)
    params = resolve_sampling_params(decode, len(tokens), ContextLimit(10**6, "limit"), frozenset())
    return Sequence(Request(id, tokens, params), None, list(tokens))


def scheduler_of(num_blocks: int = 100, block_size: int = 4, max_num_sequences: int = 4, budget: int = 64) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block_size), max_num_sequences, budget)


def step(scheduler: Scheduler) -> dict[int, int]:
    """Plan and commit with a fake model whose next token is a function of the tokens so far; finish what is full."""
    plan = scheduler.plan()
    scheduler.check_integrity()
    sampled = [item.sequence for item in plan.scheduled if item.samples]
    result = {item.sequence.request.id: item.num_new_tokens for item in plan.scheduled}
    for item in plan.scheduled:
        scheduler.commit(item)
    for s in sampled:
        s.token_ids.append((sum(s.token_ids) * 31 + len(s.token_ids)) % 997)
        if s.num_output_tokens == s.request.params.max_new_tokens:
            scheduler.remove(s)
    scheduler.check_integrity()
    return result


def test_first_come_first_served_and_refilled_at_once() -> None:
    scheduler = scheduler_of(max_num_sequences=2)
    for i, new in enumerate((1, 3, 2, 2)):
        scheduler.add(sequence(i, 3, new))
    assert [list(step(scheduler)) for _ in range(5)] == [[0, 1], [1, 2], [1, 2], [3], [3]]


def test_long_prompts_come_in_chunks_beside_those_that_generate() -> None:
    scheduler = scheduler_of(num_blocks=1000, budget=16)
    scheduler.add(sequence(0, 3, 9))
    step(scheduler)
    scheduler.add(sequence(1, 40, 2))
    scheduler.add(sequence(2, 5, 2))
    assert step(scheduler) == {0: 1, 1: 10, 2: 5}
    assert step(scheduler) == {0: 1, 1: 14, 2: 1}
    assert step(scheduler) == {0: 1, 1: 15}
    assert step(scheduler) == {0: 1, 1: 1}


def test_prompts_share_the_budget_evenly() -> None:
    scheduler = scheduler_of(num_blocks=1000, budget=30)
    for i, length in enumerate((100, 4, 50)):
        scheduler.add(sequence(i, length))
    assert step(scheduler) == {0: 13, 1: 4, 2: 13}


def test_shared_beginnings_are_computed_once() -> None:
    scheduler = scheduler_of(block_size=4, budget=64)
    system = list(range(10))
    first, second, third = (
        sequence(0, [*system, 77, 78], 9),
        sequence(1, [*system, 88], 2),
        sequence(2, [*system[1:], 5], 2),
    )
    scheduler.add(first)
    assert step(scheduler) == {0: 12}
    scheduler.add(second)
    scheduler.add(third)
    assert step(scheduler) == {0: 1, 1: 3, 2: 10}
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 8, 0)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]


def test_a_prompt_that_is_known_whole_still_computes_its_last_token() -> None:
    scheduler = scheduler_of(block_size=4)
    for i in range(2):
        scheduler.add(sequence(i, list(range(8)), 1))
        assert step(scheduler) == {i: 8 - 4 * i}


def test_the_cache_outlives_its_sequence_and_can_be_switched_off() -> None:
    scheduler = scheduler_of(block_size=4)
    for i, (prefix_cache, computed) in enumerate([(True, 9), (True, 1), (False, 9), (True, 1)]):
        scheduler.add(sequence(i, list(range(9)), 1, prefix_cache))
        assert step(scheduler) == {i: computed}


def test_least_recently_used_blocks_are_evicted_first() -> None:
    scheduler = scheduler_of(num_blocks=6, block_size=4, max_num_sequences=1)
    old, new = [1] * 9, [2] * 9
    for i, prompt in enumerate((old, new, old)):
        scheduler.add(sequence(i, prompt, 1))
        step(scheduler)
    scheduler.add(sequence(3, 13, 1))  # 4 blocks: the two free ones, and the two cached ones that were used longest ago
    step(scheduler)
    again, other = sequence(4, old, 1), sequence(5, new, 1)
    scheduler.add(again)
    step(scheduler)
    scheduler.add(other)
    step(scheduler)
    assert (again.num_cached_tokens, other.num_cached_tokens) == (8, 0)


def test_the_last_admitted_gives_way_and_starts_again() -> None:
    scheduler = scheduler_of(num_blocks=4, block_size=4)
    first, second = sequence(0, 7, 9), sequence(1, 7, 9)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == {0: 7, 1: 7}
    assert step(scheduler) == {0: 1, 1: 1}
    assert step(scheduler) == {0: 1}  # a ninth token needs a third block, and there is none
    assert scheduler.waiting[0] is second
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert second.num_output_tokens == 9


def test_removing_one_that_waits() -> None:
    scheduler = scheduler_of(max_num_sequences=1)
    first, second = sequence(0, 4), sequence(1, 4)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan()
    scheduler.remove(second)
    assert not scheduler.waiting


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_gives_the_same_tokens_and_gives_all_back(seed: int) -> None:
    rng = random.Random(seed)
    block_size, max_num_sequences = rng.choice([1, 3, 4, 16]), rng.randint(1, 5)
    scheduler = scheduler_of(
        rng.randint(40 // block_size + 2, 60), block_size, max_num_sequences, max_num_sequences + rng.randint(0, 20)
    )
    prefixes = [[p] * rng.randint(0, 12) for p in range(3)]
    alive: dict[int, Sequence] = {}
    done: list[Sequence] = []
    for id in range(150):
        if rng.random() < 0.4:
            prompt = [*rng.choice(prefixes), *rng.choices(range(5), k=rng.randint(1, 15))]
            alive[id] = sequence(id, prompt, rng.randint(1, 12), prefix_cache=rng.random() < 0.8)
            scheduler.add(alive[id])
        planned = step(scheduler)
        assert sum(planned.values()) <= scheduler.max_batched_tokens
        assert all(planned.values())
        assert bool(planned) == bool(alive)
        for s in list(alive.values()):
            if s.num_output_tokens == s.request.params.max_new_tokens:
                done.append(alive.pop(s.request.id))
            elif rng.random() < 0.02:
                scheduler.remove(alive.pop(s.request.id))
    for s in alive.values():
        scheduler.remove(s)
    scheduler.check_integrity()
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    assert len(done) > 5
    for s in done:
        tokens = list(s.request.prompt_token_ids)
        for _ in range(s.request.params.max_new_tokens):
            tokens.append((sum(tokens) * 31 + len(tokens)) % 997)
        assert s.token_ids == tokens


def test_integrity_check_sees_lost_doubled_and_miscounted_blocks() -> None:
    blocks = BlockManager(4, 16)
    mine = blocks.allocate(2)
    blocks.check_integrity([mine])
    for wrong in ([], [mine, mine], [mine[:1]]):
        with pytest.raises(RuntimeError, match="reference counts differ"):
            blocks.check_integrity(wrong)
    blocks._free.pop()
    with pytest.raises(RuntimeError, match="do not add up: 1 free, 0 cached, 2 used, 4 in all"):
        blocks.check_integrity([mine])

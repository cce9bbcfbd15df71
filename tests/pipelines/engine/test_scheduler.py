"""Scheduler and block manager: first come, first served; places refilled at once; blocks add up after every step."""

import random

import pytest

from conf.schema import DecodeConfig
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import ContextLimit, Request, Sequence, resolve_sampling_params
from pipelines.engine.scheduler import Scheduler


def sequence(id: int, num_prompt_tokens: int, max_new_tokens: int) -> Sequence:
    params = resolve_sampling_params(
        DecodeConfig(max_new_tokens=max_new_tokens), num_prompt_tokens, ContextLimit(1000, "limit"), frozenset()
    )
    return Sequence(Request(id, [0] * num_prompt_tokens, params), None, [0] * num_prompt_tokens)


def ids(scheduler: Scheduler) -> list[int]:
    return [item.sequence.request.id for item in scheduler.plan().scheduled]


def test_first_come_first_served_within_the_limit() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 2)
    sequences = [sequence(i, 3, 5) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    assert ids(scheduler) == [0, 1]
    scheduler.remove(sequences[0])
    assert ids(scheduler) == [1, 2]  # the freed place is refilled in the next plan


def test_prefill_takes_the_prompt_and_decode_one_token() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 2)
    s = sequence(0, 7, 5)
    scheduler.add(s)
    assert [item.num_new_tokens for item in scheduler.plan().scheduled] == [7]
    s.num_computed_tokens = 7
    s.token_ids.append(0)
    assert [item.num_new_tokens for item in scheduler.plan().scheduled] == [1]


def test_waits_until_the_pool_has_what_a_sequence_can_ever_need() -> None:
    scheduler = Scheduler(BlockManager(5, 4), 9)
    first, second = sequence(0, 6, 6), sequence(1, 5, 4)  # 3 blocks each
    for s in (first, second):
        scheduler.add(s)
    assert ids(scheduler) == [0]
    assert len(first.block_table) == 3
    assert scheduler.block_manager.num_free_blocks == 2
    scheduler.remove(first)
    assert ids(scheduler) == [1]


def test_removing_one_that_waits() -> None:
    scheduler = Scheduler(BlockManager(5, 4), 1)
    first, second = sequence(0, 4, 4), sequence(1, 4, 4)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan()
    scheduler.remove(second)
    assert ids(scheduler) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_add_up_in_any_order_of_events(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(BlockManager(rng.randint(6, 30), rng.choice([1, 4, 16])), rng.randint(1, 5))
    capacity = scheduler.block_manager.num_blocks * scheduler.block_manager.block_size
    alive: list[Sequence] = []
    for id in range(200):
        if rng.random() < 0.5:
            prompt = rng.randint(1, max(1, capacity // 3))
            alive.append(sequence(id, prompt, rng.randint(1, max(1, capacity // 3))))
            scheduler.add(alive[-1])
        plan = scheduler.plan()
        scheduler.check_integrity()
        assert len(plan.scheduled) <= scheduler.max_num_sequences
        assert bool(plan.scheduled) == bool(alive)  # whoever waits alone always gets in
        if alive and rng.random() < 0.5:
            scheduler.remove(alive.pop(rng.randrange(len(alive))))
            scheduler.check_integrity()
    for s in alive:
        scheduler.remove(s)
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks


def test_integrity_check_sees_lost_and_doubled_blocks() -> None:
    blocks = BlockManager(4, 16)
    mine = blocks.allocate(2)
    blocks.check_integrity([mine])
    with pytest.raises(RuntimeError, match="2 free, 0 owned, 4 in all"):
        blocks.check_integrity([])
    with pytest.raises(RuntimeError, match="do not add up"):
        blocks.check_integrity([mine, mine])

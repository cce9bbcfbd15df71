"""Scheduler: first come, first served; prompts in chunks that stall no other sequence; preemption; integrity of blocks after every step."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import (
    NO_PREFIX,
    PlacedPrefix,
    SequenceGroup,
)
from pipelines.engine.request_factory import max_blocks
from pipelines.engine.state_manager import StateManager
from tests.helpers.scheduling import Keys, States, next_token, scheduler_of, sequence, step


def test_first_come_first_served_and_refilled_at_once() -> None:
    scheduler = scheduler_of(max_num_requests=2)
    for i, new in enumerate((1, 3, 2, 2)):
        scheduler.add(sequence(i, 3, new))
    assert [list(step(scheduler)) for _ in range(5)] == [[0, 1], [1, 2], [1, 2], [3], [3]]


def test_background_requests_wait_behind_all_others() -> None:
    scheduler = scheduler_of(max_num_requests=1)
    for i in range(4):
        scheduler.add(sequence(i, 3, 1, is_background=i % 2 == 0))
    assert [list(step(scheduler)) for _ in range(4)] == [[1], [3], [0], [2]]


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
    assert second.sequences[0].block_table[:2] == first.sequences[0].block_table[:2]
    assert second.sequences[0].block_table[2] != first.sequences[0].block_table[2]


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
    scheduler = scheduler_of(num_blocks=6, block_size=4, max_num_requests=1)
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


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    blocks = BlockManager(3, 4)
    table = blocks.allocate(3)
    for block in table:
        blocks.remember(block, bytes([block]))
    blocks.free(table)
    assert blocks.allocate(1) == table[-1:]
    assert blocks.find_prefix([bytes([block]) for block in table]) == table[:-1]


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
    scheduler = scheduler_of(max_num_requests=1)
    first, second = sequence(0, 4), sequence(1, 4)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.plan()
    scheduler.cancel(second)
    assert not scheduler.waiting


def test_samples_share_the_prompt_and_copy_what_they_write() -> None:
    scheduler = scheduler_of(block_size=4)
    group = sequence(0, 6, 3, n=3, temperature=1.0)
    scheduler.add(group)
    assert step(scheduler) == {0: 6}
    tables = [s.block_table for s in group.sequences]
    assert tables[0] == tables[1] == tables[2]
    plan = scheduler.plan()
    tables = [s.block_table for s in group.sequences]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert plan.copies == [
        (tables[2][1], tables[0][1]),
        (tables[2][1], tables[1][1]),
    ]  # the last one keeps the original
    scheduler.commit(plan)
    scheduler.cancel(group)
    scheduler.check_integrity()
    assert scheduler.block_manager.num_free_blocks == 100


def test_several_sequences_count_as_one_request_and_as_many_tokens() -> None:
    scheduler = scheduler_of(max_num_requests=2, budget=5)
    for i in range(3):
        scheduler.add(sequence(i, 2, 4, num_beams=3))
    step(scheduler)
    assert [group.request.id for group in scheduler.running] == [0]  # two would need six tokens of each step


def test_whole_prompts_wait_for_a_step_that_has_room_for_them() -> None:
    scheduler = scheduler_of(budget=12, needs_whole_prompt=True)
    for i, (length, new) in enumerate(((7, 3), (6, 2), (5, 2), (10, 2))):
        scheduler.add(sequence(i, length, new, prefix_cache=False))
    assert step(scheduler) == {0: 7}  # the second would need one token more than there are
    assert step(scheduler) == {0: 1, 1: 6, 2: 5}  # exactly twelve
    assert step(scheduler) == {0: 1, 1: 1, 2: 1}  # no room for ten
    assert step(scheduler) == {3: 10}
    assert step(scheduler) == {3: 1}
    assert step(scheduler) == {}


def test_whole_prompts_leave_room_for_the_sequences_to_come() -> None:
    scheduler = scheduler_of(budget=9, needs_whole_prompt=True)
    scheduler.add(sequence(0, 2, 4, prefix_cache=False, num_beams=4))
    scheduler.add(sequence(1, 6, 4, prefix_cache=False))
    scheduler.add(sequence(2, 5, 1, prefix_cache=False))
    assert step(scheduler) == {0: 2}  # 2 and 6 tokens would fit, but there will be four beams in addition to the six
    assert [step(scheduler) for _ in range(2)] == [{0: 2}, {0: 3}]  # the fake beams become one more in each step
    assert [group.request.id for group in scheduler.waiting] == [1, 2]  # first come, first served


def test_a_preempted_prompt_is_whole_again_with_what_followed_it() -> None:
    scheduler = scheduler_of(num_blocks=4, block_size=4, budget=16, needs_whole_prompt=True)
    first, second = (sequence(i, 7, 9, prefix_cache=False) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    assert [step(scheduler) for _ in range(3)] == [{0: 7, 1: 7}, {0: 1, 1: 1}, {0: 1}]
    assert [step(scheduler) for _ in range(6)] == [{0: 1}] * 6  # its blocks are the first one's
    assert first.num_output_tokens == 9
    assert step(scheduler) == {1: 9}  # seven of the prompt and two that it had generated


def test_beginnings_are_shared_only_under_the_same_salt() -> None:
    scheduler = scheduler_of(block_size=4)
    hits = []
    for i, salt in enumerate((None, "a", "a", "b", None, "\ud800", "\ud800")):
        group = sequence(i, list(range(9)), 1, cache_salt=salt)
        scheduler.add(group)
        step(scheduler)
        hits.append(group.num_cached_tokens)
    assert hits == [0, 0, 8, 0, 8, 0, 8]


def test_a_smaller_budget_is_the_prompts_alone() -> None:
    """Sequences that generate keep their token. A prompt that cannot be cut is computed whole."""
    scheduler = scheduler_of(budget=64)
    for i, prompt in enumerate((3, 3, 3, 30)):
        scheduler.add(sequence(i, prompt, 9))
    assert step(scheduler, max_tokens=13) == {0: 3, 1: 3, 2: 3, 3: 4}
    assert step(scheduler, max_tokens=13) == {0: 1, 1: 1, 2: 1, 3: 10}
    assert step(scheduler, max_tokens=2) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert step(scheduler, max_tokens=1000) == {0: 1, 1: 1, 2: 1, 3: 15}
    whole = scheduler_of(budget=64, needs_whole_prompt=True)
    whole.add(sequence(0, 30, 9))
    assert step(whole, max_tokens=2) == {0: 30}


def test_what_ended_since_the_plan_was_made_is_not_committed() -> None:
    scheduler = scheduler_of(block_size=4)
    groups = [sequence(i, 8) for i in range(2)]
    for group in groups:
        scheduler.add(group)
    plan = scheduler.plan()
    scheduler.cancel(groups[0])
    scheduler.commit(plan)
    assert [group.origin.num_computed_tokens for group in groups] == [0, 0]
    assert [item.sequence.num_computed_tokens for item in plan.scheduled] == [0, 8]
    scheduler.check_integrity()
    scheduler.add(again := sequence(0, 9))  # whose prefix is not in the cache
    scheduler.plan()
    assert again.num_cached_tokens == 0


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Arrivals, steps and cancellations in any order and pools of any size: nothing is lost, and every token is as if alone."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_requests=st.integers(1, 5),
        spare_tokens=st.integers(0, 20),
        pool_tokens=st.integers(30, 90),
        whole_prompts=st.booleans(),
        long_rope_threshold=st.one_of(st.none(), st.integers(1, 30)),
        num_prefix_tokens=st.sampled_from([0, 1, 4, 7]),
        num_slots=st.one_of(st.just(0), st.integers(8, 30)),
        saves_outputs=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        max_num_requests: int,
        spare_tokens: int,
        pool_tokens: int,
        whole_prompts: bool,
        long_rope_threshold: int | None,
        num_prefix_tokens: int,
        num_slots: int,
        saves_outputs: bool,
    ) -> None:
        num_blocks, budget = -(-pool_tokens // block_size), max_num_requests + 4 + spare_tokens
        if whole_prompts:
            budget, long_rope_threshold = budget + 20, None  # else few prompts would fit; and no model has both
        if whole_prompts or long_rope_threshold:
            num_slots = 0  # no model has both
        if whole_prompts or long_rope_threshold or num_slots:
            num_prefix_tokens = 0  # such models are refused
        self.scheduler = scheduler_of(
            num_blocks,
            block_size,
            max_num_requests,
            budget,
            StateManager(num_slots, saves_outputs),
            needs_whole_prompt=whole_prompts,
            long_rope_threshold=long_rope_threshold,
        )
        self.long_rope_threshold = long_rope_threshold
        blocks = self.scheduler.block_manager
        own = blocks.allocate(blocks.num_blocks_for(num_prefix_tokens))
        blocks.pin(own)
        self.placed = PlacedPrefix(num_prefix_tokens, 0, "story", tuple(own)) if own else NO_PREFIX
        self.sides: dict[int, bool] = {}
        self.shorter = patch("pipelines.engine.snapshots.MIN_TOKENS", 1)  # so that these short prompts leave snapshots
        self.shorter.start()
        self.keys: Keys = {}
        self.states: States = {}
        self.alive: list[SequenceGroup] = []
        self.num_added = 0

    @rule(
        prefix=st.sampled_from([(0, 0), (1, 5), (1, 12), (2, 12)]),
        rest=st.lists(st.integers(0, 4), min_size=1, max_size=15),
        max_new_tokens=st.integers(1, 20),
        prefix_cache=st.booleans(),
        behind_prefix=st.booleans(),
        decode=st.sampled_from([{}, {}, {"n": 3, "temperature": 1.0}, {"num_beams": 2}, {"num_beams": 4}]),
    )
    def add(
        self,
        prefix: tuple[int, int],
        rest: list[int],
        max_new_tokens: int,
        prefix_cache: bool,
        behind_prefix: bool,
        decode: dict[str, Any],
    ) -> None:
        prompt = [prefix[0]] * prefix[1] + rest
        if self.scheduler._needs_whole_prompt:  # the engine refuses what could never run, and shares no beginnings
            prefix_cache = False
            if len(prompt) + max_new_tokens > self.scheduler.max_batched_tokens:
                return
        placed = self.placed if behind_prefix else NO_PREFIX
        group = sequence(self.num_added, prompt, max_new_tokens, prefix_cache, placed, **decode)
        blocks = self.scheduler.block_manager
        sizes = len(prompt), blocks.block_size, self.long_rope_threshold, placed.num_tokens
        if max_blocks(group.request.params, *sizes) <= blocks.num_blocks - len(self.placed.blocks):
            self.num_added += 1
            self.alive.append(group)
            self.scheduler.add(group)

    @rule(
        steps=st.integers(1, 10),
        max_tokens=st.one_of(st.none(), st.integers(1, 40)),
        num_drafts=st.integers(0, 6),
        num_right=st.integers(0, 6),
    )
    def run(self, steps: int, max_tokens: int | None = None, num_drafts: int = 0, num_right: int = 0) -> None:
        for _ in range(steps):
            planned = step(
                self.scheduler,
                self.sides if self.long_rope_threshold else None,
                max_tokens,
                self.keys,
                num_drafts,
                num_right,
                self.states,
            )
            assert sum(planned.values()) <= self.scheduler.max_batched_tokens
            assert bool(planned) == bool(self.alive)
            for group in [group for group in self.alive if not group.sequences]:
                self.alive.remove(group)
                check_tokens(group)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        group = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.scheduler.cancel(group)

    @invariant()
    def blocks_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.alive:
                break
            self.run(1)
        assert not self.alive
        blocks = self.scheduler.block_manager
        assert blocks.num_free_blocks == blocks.num_blocks - len(self.placed.blocks)
        self.shorter.stop()


def check_tokens(group: SequenceGroup) -> None:
    params = group.request.params
    assert len(group.completions) == (1 if group.search else params.n)
    for sample, completion in group.completions.items():
        tokens = list(group.request.prompt_token_ids)
        for _ in range(params.max_new_tokens):  # the first beam's parent is always the first beam
            tokens.append(next_token(tokens) + sample)
        assert completion.token_ids == tokens[len(group.request.prompt_token_ids) :]


AnyOrderOfEvents.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase


def test_integrity_check_sees_lost_doubled_and_miscounted_blocks() -> None:
    blocks = BlockManager(4, 16)
    mine = blocks.allocate(2)
    blocks.check_integrity([mine])
    for wrong in ([], [mine, mine], [mine[:1]]):
        with pytest.raises(RuntimeError, match="reference counts differ"):
            blocks.check_integrity(wrong)
    blocks._empty.pop()
    with pytest.raises(RuntimeError, match="do not add up: 1 empty, 0 cached, 2 used, 4 in all"):
        blocks.check_integrity([mine])


def test_microbatches_share_the_rows_that_no_other_has() -> None:
    scheduler = scheduler_of(64, 4, 8, 64)
    groups = [sequence(i, 3) for i in range(5)]
    for group in groups:
        scheduler.add(group)
    first = scheduler.plan(num_microbatches=2)
    second = scheduler.plan(in_flight=[first], num_microbatches=2)
    assert [[item.group for item in plan.scheduled] for plan in (first, second)] == [groups[:3], groups[3:]]
    assert scheduler.plan(in_flight=[first, second], num_microbatches=2).scheduled == []
    scheduler.commit(first)
    for group in groups[:3]:
        scheduler.cancel(group)
    scheduler.commit(second)
    for group in groups[3:]:
        group.sequences[0].token_ids.append(7)
    assert [item.group for item in scheduler.plan(num_microbatches=2).scheduled] == groups[
        3:4
    ]  # even microbatches, as rows end


def test_a_row_without_blocks_waits_for_those_under_way() -> None:
    scheduler = scheduler_of(2, 4, 8, 64)
    groups = [sequence(i, 4, prefix_cache=False) for i in range(2)]
    for group in groups:
        scheduler.add(group)
    first = scheduler.plan(num_microbatches=2)
    second = scheduler.plan(in_flight=[first], num_microbatches=2)
    scheduler.commit(first)
    groups[0].sequences[0].token_ids.append(7)  # needs a block, of which there is none
    assert scheduler.plan(in_flight=[second], num_microbatches=2).scheduled == []
    assert (scheduler.running, groups[0].num_preemptions) == (groups, 0)
    scheduler.commit(second)
    assert [item.group for item in scheduler.plan(num_microbatches=2).scheduled] == groups[:1]
    assert (scheduler.running, groups[1].num_preemptions) == (groups[:1], 1)
    scheduler.check_integrity()

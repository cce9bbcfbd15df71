"""Slots of adapters: compared with a list of their expected content, for any order of events, and in the scheduler."""

from hypothesis import given
from hypothesis import strategies as st

from conf.decoding import DecodeConfig
from models.capabilities import ModelCapabilities
from pipelines.engine.adapter_slots import AdapterId, AdapterSlots
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.request import ContextLimit, Request, Sequence, SequenceGroup
from pipelines.engine.request_factory import resolve_sampling_params
from pipelines.engine.scheduler import Scheduler

IDS = [AdapterId(name, digest) for name in "ab" for digest in ("one", "two", "three")]


@given(
    num_slots=st.integers(1, 4),
    events=st.lists(st.tuples(st.sampled_from(["use", "end", "forget", "pin"]), st.sampled_from(IDS))),
)
def test_any_order_of_events(num_slots: int, events: list[tuple[str, AdapterId]]) -> None:
    """An adapter in use stays in its slot, and a pinned one. Of the rest, the adapter whose last use began first is
    evicted."""
    contents: dict[int, AdapterId] = {}
    slots = AdapterSlots(num_slots, contents.__setitem__)
    users: dict[AdapterId, list[int]] = {id: [] for id in IDS}  # the slots that its users got
    by_use: list[AdapterId] = []
    pinned: set[AdapterId] = set()
    for event, id in events:
        if event == "use":
            idle = [adapter_id for adapter_id in by_use if not users[adapter_id] and adapter_id not in pinned]
            slot = slots.acquire(id)
            if id not in by_use and len(by_use) == num_slots:
                assert (slot is None) == (not idle)
                by_use = [adapter_id for adapter_id in by_use if not idle or adapter_id != idle[0]]
            if slot is not None:
                users[id].append(slot)
                by_use = [*(adapter_id for adapter_id in by_use if adapter_id != id), id]
        elif event == "end" and users[id]:
            users[id].pop()
            slots.release(id)
        elif event == "forget" and not users[id]:
            slots.forget(id)
            by_use = [adapter_id for adapter_id in by_use if adapter_id != id]
            pinned.discard(id)
        elif event == "pin":
            slots.pin(id)
            pinned.add(id)
        assert slots.resident == by_use
        assert all(
            contents[slot] == adapter_id and 0 <= slot < num_slots for adapter_id in IDS for slot in users[adapter_id]
        )


def group_of(id: int, num_tokens: int, adapter: AdapterId) -> SequenceGroup:
    params = resolve_sampling_params(DecodeConfig(max_new_tokens=9), num_tokens, ContextLimit(64, "limit"), frozenset())
    request = Request(id, list(range(num_tokens)), params, adapter=adapter)
    return SequenceGroup(request, Sequence.begin(request), None)


def test_a_group_that_waits_holds_neither_a_slot_nor_blocks() -> None:
    """A group without blocks leaves the slot to other groups, and a group without a slot leaves the blocks, including
    cached ones."""
    slots = AdapterSlots(1, lambda slot, id: None)
    scheduler = Scheduler(BlockManager(5, 4), 4, 64, ModelCapabilities(), slots)
    first, second = IDS[:2]

    def end_all() -> None:
        for group in [*scheduler.running, *scheduler.waiting]:
            scheduler.cancel(group)

    scheduler.add(group_of(0, 9, second))
    scheduler.commit(scheduler.plan())
    end_all()
    scheduler.add(group_of(1, 5, first))
    scheduler.add(group_of(2, 9, second))
    assert [item.group.request.id for item in scheduler.plan().scheduled] == [1]
    assert slots.resident == [first]
    assert scheduler.block_manager.num_free_blocks == 3
    end_all()
    scheduler.block_manager.allocate(4)  # so that one more fits
    scheduler.add(group_of(3, 5, second))
    assert scheduler.plan().scheduled == []
    assert slots.resident == [first]

"""Where states are saved, which are dropped first, and how many prompt tokens seeded traces find in the cache."""

import pytest

from pipelines.engine.snapshots import place_snapshots
from pipelines.engine.state_manager import StateManager
from tests.helpers.tiers import tiers
from tests.helpers.traces import TRACES, hit_rate, scheduler_of_memory

MODELS = {  # bytes: of the cache, of a token, of a slot; the least rates of 1,000 requests
    "Qwen3.5-4B": ((8 * 10**9, 32_768, 51_500_000), (0.90, 0.88, 0.82)),
    "LFM2-1.2B": ((10**9, 12_288, 81_920), (0.92, 0.84, 0.82)),
}


def test_snapshots_lie_at_block_ends_of_turns_or_of_known_blocks() -> None:
    turns = [*[5] * 99, 1, *[6] * 99, 1, *[7] * 99, 1, 2]  # 100 tokens each
    assert place_snapshots(turns, {1}, 16, 0, 0) == ((96, 288), 100)
    assert place_snapshots(turns, {1}, 16, 192, 96) == ((288,), 100)
    assert place_snapshots(turns, {1}, 16, 288, 288) == ((), 100)
    assert place_snapshots(turns[:130], {1}, 16, 0, 0) == ((96,), 100)  # the first turn is the last one
    assert place_snapshots(turns[:40], {1}, 16, 32, 0) == ((), 40)  # nothing known beyond MIN_TOKENS
    assert place_snapshots(turns[:99], {1}, 16, 80, 0) == ((80,), 99)
    assert place_snapshots([*turns[:60], 1, 9], {1}, 16, 0, 0) == ((), 61)  # a turn shorter than MIN_TOKENS


def test_superseded_and_seldom_read_snapshots_are_dropped_first() -> None:
    manager, rows = StateManager(6), [list[int]() for _ in range(6)]
    for i, row in enumerate(rows):
        manager.take(row, is_started=False)
        manager.remember(row[-1], b"%d" % i)
    manager.supersede(b"2"), manager.drop(b"3")  # a row still owns it
    slots = [row[0] for row in rows]
    for row in rows:
        manager.free(row)
    for number, times in ((0, 2), (1, 1), (2, 1)):
        manager.count_hits([slots[number]] * times)
    dropped = []
    for row in rows:
        manager.take(row, is_started=False)
        dropped.append(slots.index(row[-1]))
    manager.check_integrity(rows)
    assert dropped == [2, 1, 3, 4, 5, 0]
    assert manager.find([b"0", b"1"]) == (0, [])


@pytest.mark.parametrize("num_requests", tiers([120, 1000], quick=[120], long=[1000]))
def test_traces_hit_nearly_what_keys_and_values_alone_would(num_requests: int) -> None:
    """The bound has the whole memory for blocks, and needs no state. Blocks and slots fit the memory, and none leaks."""
    for model, ((memory, token_bytes, slot_bytes), least) in MODELS.items():
        for (name, trace), floor in zip(TRACES.items(), least, strict=True):
            bound = hit_rate(scheduler_of_memory(memory, token_bytes, 0), trace(num_requests))
            rate = hit_rate(scheduler_of_memory(memory, token_bytes, slot_bytes), trace(num_requests))
            assert bound - 0.04 < rate <= bound, (model, name)
            assert rate > floor or num_requests < 1000, (model, name)

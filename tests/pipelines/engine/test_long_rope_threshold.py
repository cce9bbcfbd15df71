"""Scheduler: sequences that grow past a model's `long_rope_threshold`. Their tokens:
tests/models/families/test_phi3.py."""

from dataclasses import replace

from pipelines.engine.request_factory import max_blocks
from tests.helpers.scheduling import scheduler_of, sequence, step


def test_sequences_that_grow_past_the_border_are_computed_again_and_ready_together() -> None:
    scheduler = scheduler_of(block_size=4, budget=12, long_rope_threshold=8)
    scheduler.add(sequence(0, 7, 4, n=3, temperature=1.0))
    assert [step(scheduler) for _ in range(2)] == [{0: 7}, {0: 3}]  # two tokens each now, nine with the prompt's
    # the last tokens of all sequences wait for one step
    assert [step(scheduler) for _ in range(3)] == [{0: 12}, {0: 12}, {0: 3}]
    assert step(scheduler) == {0: 3}
    assert not scheduler.running


def test_recomputed_sequences_share_no_blocks() -> None:
    params = sequence(0, 8, 12, n=3, temperature=1.0).request.params
    assert max_blocks(params, 8, 4, 20) == 2 + 3 * 3
    assert max_blocks(replace(params, max_new_tokens=13), 8, 4, 20) == 3 * 6
    assert max_blocks(params, 21, 4, 20) == 5 + 3 * 4  # its samples begin past the threshold

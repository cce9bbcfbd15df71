"""The assignment of rows to replicas, in any order of events: each row is done once, and none is lost."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.jobs.prompts import PromptRow
from pipelines.replicas.dispatch import MAX_LOSSES, Dispatch

WINDOW = 4


def dispatch_of(num_rows: int) -> Dispatch:
    rows = map(PromptRow, range(num_rows))
    return Dispatch(lambda: next(rows, None), WINDOW)


def taken(dispatch: Dispatch, replica: int, most: int = WINDOW) -> list[int]:
    return [row.index for row in dispatch.take(replica, most)]


def test_a_replica_has_no_more_than_its_window() -> None:
    dispatch = dispatch_of(7)
    assert taken(dispatch, 0, most=3) == [0, 1, 2]
    assert taken(dispatch, 0, most=3) == [3]
    assert taken(dispatch, 0, most=3) == []
    dispatch.done(0, 2)
    assert taken(dispatch, 0, most=3) == [4]
    assert taken(dispatch, 1) == [5, 6]
    assert (dispatch.holds(0), dispatch.holds(1), dispatch.is_done) == (4, 2, False)
    for replica, index in ((0, 0), (0, 1), (0, 3), (0, 4), (1, 5), (1, 6)):
        dispatch.done(replica, index)
    assert taken(dispatch, 0) == []
    assert dispatch.is_done


def test_rows_of_a_lost_replica_go_first() -> None:
    dispatch = dispatch_of(9)
    assert taken(dispatch, 0) == [0, 1, 2, 3]
    dispatch.done(0, 1)
    assert dispatch.lost(0) == []
    assert dispatch.holds(0) == 0
    assert taken(dispatch, 1, most=2) == [0, 2]
    assert taken(dispatch, 0) == [3, 4, 5, 6]


def test_a_row_that_lost_two_replicas_runs_alone_and_one_that_lost_three_no_more() -> None:
    dispatch = dispatch_of(6)
    for replica in (0, 1):
        assert taken(dispatch, replica, most=2) == [0, 1]
        assert dispatch.lost(replica) == []
    assert taken(dispatch, 0) == [0]
    assert taken(dispatch, 0) == []  # while that one runs
    assert taken(dispatch, 1) == [1]
    assert [row.index for row in dispatch.lost(1)] == [1]
    assert taken(dispatch, 1) == [2, 3, 4, 5]
    dispatch.done(0, 0)
    assert taken(dispatch, 0) == []
    assert not dispatch.is_done
    for index in (2, 3, 4, 5):
        dispatch.done(1, index)
    assert dispatch.is_done


def test_who_runs_alone_waits_until_its_replica_has_no_other() -> None:
    dispatch = dispatch_of(9)
    taken(dispatch, 0, most=1)
    dispatch.lost(0)
    assert taken(dispatch, 0, most=1) == [0]
    assert taken(dispatch, 1, most=2) == [1, 2]
    dispatch.lost(0)
    assert taken(dispatch, 1) == []
    dispatch.done(1, 1)
    assert taken(dispatch, 1) == []
    dispatch.done(1, 2)
    assert taken(dispatch, 1) == [0]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=200))
def test_each_row_ends_once_whatever_happens(num_rows: int, events: list[tuple[int, int, bool]]) -> None:
    """A replica takes rows, then is lost or finishes one of its rows, selected by a number."""
    dispatch = dispatch_of(num_rows)
    held: dict[int, list[int]] = {0: [], 1: [], 2: []}
    losses, ended = Counter[int](), list[int]()

    def happen(replica: int, number: int, is_lost: bool) -> None:
        rows = held[replica]
        rows += taken(dispatch, replica, most=1 + number)
        assert dispatch.holds(replica) == len(rows) <= WINDOW
        assert len(rows) == 1 or all(losses[index] < 2 for index in rows)
        assert sum(map(len, held.values())) == len({index for replica_rows in held.values() for index in replica_rows})
        if is_lost:
            losses.update(rows)
            given_up = [row.index for row in dispatch.lost(replica)]
            assert given_up == [index for index in rows if losses[index] == MAX_LOSSES]
            ended.extend(given_up)
            rows.clear()
        elif rows:
            ended.append(rows.pop(number % len(rows)))
            dispatch.done(replica, ended[-1])
        assert len(ended) == num_rows or not dispatch.is_done

    for event in events:
        happen(*event)
    for turn in range(4 * num_rows + 4):
        happen(turn % 3, 0, is_lost=False)
    while any(held.values()):
        for replica in held:
            happen(replica, 3, is_lost=False)
    assert dispatch.is_done
    assert sorted(ended) == list(range(num_rows))

"""Deltas are merged in order, into a bounded number of chunks."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from pipelines.replicas.engine_process.frames import Delta, Logprob
from pipelines.replicas.engine_process.gate import MAX_CHUNKS_PER_S, PAUSE_S, Gate

KEYS = [(1, 0), (1, 1), (2, 0)]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(KEYS)),
        st.tuples(st.just("end"), st.sampled_from(KEYS)),
        st.tuples(st.just("take"), st.floats(0, 0.01)),
    ),
    max_size=60,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(EVENTS)
def test_deltas_are_taken_complete_and_in_order(events: list[tuple[str, object]]) -> None:
    clock, numbers, ended = Clock(), count(), set()
    gate, taken = Gate(clock), list[Delta]()
    put: dict[tuple[int, int], list[int]] = {key: [] for key in KEYS}
    for action, argument in events:
        if action == "take":
            clock.now_s += argument
            taken += gate.take()
        elif argument not in ended and action == "put":
            number = next(numbers)
            put[argument].append(number)
            gate.put(*argument, [number], f"<{number}>", [Logprob(number, -0.5, 1, [])])
        elif argument not in ended:
            ended.add(argument)
            gate.end(*argument, "stop", argument[0])
    clock.now_s += 1
    taken += gate.take()
    assert gate.take() == []
    for key, numbers_put in put.items():
        deltas = [delta for delta in taken if (delta.id, delta.sample) == key]
        assert "".join(delta.text for delta in deltas) == "".join(f"<{number}>" for number in numbers_put)
        assert [token for delta in deltas for token in delta.token_ids] == numbers_put
        assert [entry.token_id for delta in deltas for entry in delta.logprobs] == numbers_put
        reasons = [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason]
        assert reasons == ([("stop", key[0])] if key in ended else [])
        assert not reasons or deltas[-1].finish_reason


def test_a_first_token_and_an_end_do_not_wait() -> None:
    clock = Clock()
    gate = Gate(clock)
    for id in range(64):
        gate.put(id, 0, [id], "a", [])
    assert [delta.id for delta in gate.take()] == list(range(64))
    gate.put(5, 0, [1], "b", [])
    gate.put(6, 0, [2], "c", [])
    assert gate.take() == []
    gate.end(6, 0, "length", None)
    gate.put(99, 0, [3], "d", [])
    assert [(delta.id, delta.text) for delta in gate.take()] == [(6, "c"), (99, "d")]
    clock.now_s = 64 / MAX_CHUNKS_PER_S  # the streams that continue: 63 of the first, and number 99
    assert [(delta.id, delta.text) for delta in gate.take()] == [(5, "b")]


def test_chunks_are_bounded_however_fast_steps_follow() -> None:
    clock, num_chunks, num_streams = Clock(), 0, 50
    gate = Gate(clock)
    for step in range(1000):  # a second
        clock.now_s = step / 1000
        for id in range(num_streams):
            gate.put(id, 0, [step], "x", [])
        num_chunks += len(gate.take())
    assert 0.9 * MAX_CHUNKS_PER_S <= num_chunks <= MAX_CHUNKS_PER_S + num_streams


def test_one_stream_of_fast_steps_has_several_tokens_in_a_chunk() -> None:
    clock, num_chunks = Clock(), 0
    gate = Gate(clock)
    for step in range(10_000):  # a second
        clock.now_s = step / 10_000
        gate.put(1, 0, [step], "x", [])
        num_chunks += len(gate.take())
    assert 0.9 / PAUSE_S <= num_chunks <= 1 / PAUSE_S + 1


def test_one_stream_of_slow_steps_has_every_token() -> None:
    clock = Clock()
    gate = Gate(clock)
    for step in range(10):
        clock.now_s = 0.002 * step
        gate.put(1, 0, [step], "x", [])
        assert [delta.token_ids for delta in gate.take()] == [[step]]


def test_a_dropped_request_says_nothing_more() -> None:
    gate = Gate(Clock())
    gate.put(1, 0, [1], "a", [])
    gate.put(2, 0, [2], "b", [])
    gate.drop(1)
    assert [delta.id for delta in gate.take()] == [2]

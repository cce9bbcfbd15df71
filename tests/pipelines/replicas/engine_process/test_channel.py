"""The engine's end of the socket: waits that end, and receives of bounded size."""

import socket
import threading

from pipelines.replicas.engine_process.channel import CHUNK, MAX_CHUNKS, Channel
from pipelines.replicas.engine_process.frames import Submit, encode


def test_a_wait_ends_by_wake_from_a_thread_and_by_one_before_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        thread = threading.Thread(target=channel.wake)
        thread.start()
        assert channel.receive(waits=True) == []
        thread.join()
        for _ in range(100_000):  # more than a socket buffers
            channel.wake()
        assert channel.receive(waits=True) == []
        ours.sendall(encode(Submit(1, [5], {})))
        assert channel.receive(waits=True) == [Submit(1, [5], {})]
        ours.close()
        assert channel.receive(waits=True) is None


def test_a_flood_is_received_in_parts() -> None:
    """A sender that never pauses does not delay steps."""
    ours, theirs = socket.socketpair()
    submit, num_frames = Submit(1, [70_000] * (CHUNK // 5), {}), 2 * MAX_CHUNKS
    with ours, theirs:
        channel = Channel(theirs)
        flood = threading.Thread(target=lambda: [ours.sendall(encode(submit)) for _ in range(num_frames)])
        flood.start()
        received = []
        while len(received) < num_frames:
            part = channel.receive(waits=True)
            assert part is not None
            assert len(part) <= MAX_CHUNKS + 1
            received += part
        flood.join()
    assert received == [submit] * num_frames

"""What crosses the sockets between rank 0 and the others, and what of others is refused."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.ranks.messages import LENGTHS, MAX_HELLO_BYTES, Channel, Gone


def test_messages_arrive_whole_and_others_are_refused() -> None:
    pair = socket.socketpair()
    ours, theirs = map(Channel, pair)
    ours.send({"op": "run", "text": "é"}, b"\0\1\2")
    ours.send({})
    assert theirs.receive() == ({"op": "run", "text": "é"}, b"\0\1\2")
    assert theirs.receive() == ({}, b"")
    for content in (b"[]", b"{", b"\xff", b"[" * 100_000):
        pair[0].sendall(LENGTHS.pack(len(content), 0) + content)
        with pytest.raises(Gone):
            theirs.receive()
    pair[0].sendall(LENGTHS.pack(1 << 30, 0))
    with pytest.raises(Gone):
        theirs.receive()
    ours.close()
    with pytest.raises(Gone):
        theirs.receive()
    with pytest.raises(Gone):
        ours.send({})


def test_a_hello_is_short_and_comes_soon() -> None:
    pair = socket.socketpair()
    ours, theirs = map(Channel, pair)
    ours.send({"rank": 1})
    ours.send({}, b"\0" * 9)
    assert theirs.receive_hello(60.0) == {"rank": 1}
    assert theirs.receive() == ({}, b"\0" * 9)
    assert pair[1].gettimeout() is None
    for lengths in (
        (2, 1 << 34),
        (MAX_HELLO_BYTES + 1, 0),
    ):  # refused before memory is taken, and nothing more is waited for
        pair[0].sendall(LENGTHS.pack(*lengths))
        with pytest.raises(Gone):
            theirs.receive_hello(60.0)
    with pytest.raises(Gone):
        theirs.receive_hello(0.01)


def test_a_hello_that_comes_byte_by_byte_is_given_up() -> None:
    ours, theirs = socket.socketpair()

    def drip() -> int:
        """Send a byte now and then; return how many were taken."""
        ours.sendall(LENGTHS.pack(MAX_HELLO_BYTES, 0))
        for number in range(MAX_HELLO_BYTES):
            try:
                ours.send(b" ")
            except OSError:
                return number
            time.sleep(0.02)
        return MAX_HELLO_BYTES

    with ThreadPoolExecutor() as threads:
        sent = threads.submit(drip)
        channel = Channel(theirs)
        with pytest.raises(Gone):
            channel.receive_hello(0.2)
        channel.close()
        assert sent.result() < MAX_HELLO_BYTES

"""Messages on the sockets between rank 0 and the other ranks, and rejected data."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from models.batch import Batch
from pipelines.ranks.encoding import ALIGNMENT, decode, encode
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
    ):  # refused before memory is allocated, and nothing more is waited for
        pair[0].sendall(LENGTHS.pack(*lengths))
        with pytest.raises(Gone):
            theirs.receive_hello(60.0)
    with pytest.raises(Gone):
        theirs.receive_hello(0.01)


def test_a_hello_that_comes_byte_by_byte_is_given_up() -> None:
    ours, theirs = socket.socketpair()

    def drip() -> int:
        """Send a byte now and then; return how many were accepted."""
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


class Pair(NamedTuple):
    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Everything:
    batch: Batch
    pairs: list[Pair]
    named: dict[str, Tensor] | None
    absent: Tensor | None
    sizes: tuple[int, Tensor]
    config: dict[str, Any]


def test_an_operation_is_equal_after_its_message() -> None:
    batch = Batch.of([7, 8], [0, 1], [16, 17], [[1]], [0, 2], [2], [2], [()], [1], [0, 1])
    pairs = [Pair(torch.tensor([True, False, True]), torch.tensor(0.5, dtype=torch.bfloat16))]
    named = {"columns": torch.arange(6).view(2, 3).T, "empty": torch.empty(0, 4)}
    message = Everything(batch, pairs, named, None, (3, torch.ones(5, dtype=torch.int8)), {"tensor": [1, None]})
    ours, theirs = map(Channel, socket.socketpair())
    fields, payload = encode(message)
    ours.send({"fields": fields}, payload)
    header, content = theirs.receive()
    decoded: Everything = decode(Everything, header["fields"], content, torch.device("cpu"))
    assert (decoded.batch.shape, decoded.config, decoded.absent) == (batch.shape, message.config, None)
    assert decoded.batch.numbers.equal(batch.numbers)
    assert decoded.named is not None
    assert [*decoded.named] == [*named]
    tensors = [*decoded.pairs[0], *decoded.named.values(), decoded.sizes[1]]
    for tensor, expected in zip(tensors, [*pairs[0], *named.values(), message.sizes[1]], strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.equal(expected)
        assert tensor.data_ptr() % ALIGNMENT == 0

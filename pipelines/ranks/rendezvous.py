"""Rendezvous of ranks that torchrun or srun has started: over a Unix socket on one machine, over TCP across machines.

Rank 0 listens before it looks for its model, which may have to be downloaded or calibrated. Linux queues the workers'
connections meanwhile.
"""

import functools
import os
import socket
import struct
import time

from conf.errors import UserError
from pipelines.ranks.launch import Joined, Rank
from pipelines.ranks.messages import Channel, Gone

RENDEZVOUS_S = 120.0  # for all ranks to connect
LOOPBACK = "127.0.0.1"
HELLO_S = 5.0  # for a new connection to send its hello
LOST_S = 30  # for a machine to answer
REMEDY = "start all of them together, where they reach each other"


def await_ranks(launched: Joined) -> list[Rank]:
    """Wait for the ranks that a launcher has started. Raises UserError if they do not come, and on a second call."""
    with listen(launched) as listener:
        if listener.fileno() < 0:
            problem = f"the ranks that {launched.launcher} started have ended with the first model of this process"
            raise UserError(f"{problem}: run each job of a sweep by itself, or without {launched.launcher}")
        ranks: dict[int, Rank] = {}
        end = time.monotonic() + RENDEZVOUS_S
        while len(ranks) < launched.size - 1:
            listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                stream, _ = listener.accept()
            except TimeoutError as error:
                missing = sorted({*range(1, launched.size)} - ranks.keys())
                problem = f"ranks {missing} of {launched.launcher} have not come within {RENDEZVOUS_S:g} s"
                raise UserError(f"{problem}: {REMEDY}") from error
            rank = _welcome(launched, stream)
            if rank is None or rank.rank in ranks:
                stream.close()
            else:
                ranks[rank.rank] = rank
    return [ranks[rank] for rank in sorted(ranks)]


@functools.cache
def listen(launched: Joined) -> socket.socket:
    """Return the socket on which rank 0 waits for workers.

    Returns the same socket until `await_ranks` closes it. Raises UserError.
    """
    if launched.address is not None:
        try:
            return socket.create_server(("", launched.address[1]), backlog=launched.size)
        except OSError as error:
            remedy = (
                "give another --master-port"
                if launched.launcher == "torchrun"
                else "start srun again, for another port"
            )
            problem = f"port {launched.address[1]}, where ranks meet rank 0, cannot be used"
            raise UserError(f"{problem}: {error}: {remedy}") from error
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name(launched))
    except OSError as error:
        listener.close()
        raise UserError(f"{launched.launcher} started two jobs of one name, {launched.name}: {error}") from error
    listener.listen(launched.size)
    return listener


def _welcome(launched: Joined, stream: socket.socket) -> Rank | None:
    if launched.address is None and _user(stream) != os.getuid():
        return None
    channel = Channel(stream)
    try:
        hello = channel.receive_hello(HELLO_S)
    except Gone:
        return None
    rank, pid, cpus = hello.get("rank"), hello.get("pid"), hello.get("cpus")
    if hello.get("job") != launched.name or not isinstance(rank, int) or not isinstance(pid, int):
        return None
    if not isinstance(cpus, list) or not all(isinstance(cpu, int) for cpu in cpus):
        return None
    if not 0 < rank < launched.size:
        return None
    if launched.address is None:
        return Rank(rank, pid, channel, cpus=frozenset(cpus))
    _watch_machine(stream)
    return Rank(rank, pid, channel, host=str(hello.get("host")), cpus=frozenset(cpus))


def join(launched: Joined) -> Channel:
    """Return the channel to rank 0. Raises UserError if it cannot be reached."""
    end = time.monotonic() + RENDEZVOUS_S
    while True:
        try:
            return _greet(launched, _connect(launched))
        except (OSError, Gone) as error:
            if time.monotonic() > end:
                where = "" if launched.address is None else " at {}:{}".format(*launched.address)
                reason = error.__cause__ or error
                problem = f"rank {launched.rank} has not met rank 0{where} within {RENDEZVOUS_S:g} s"
                raise UserError(f"{problem}: {reason}: {REMEDY}") from error
            time.sleep(0.05)


def _greet(launched: Joined, stream: socket.socket) -> Channel:
    if launched.address is not None:
        _watch_machine(stream)
    elif _user(stream) != os.getuid():
        raise UserError(f"another user has taken the name of this job, {launched.name}")
    channel = Channel(stream)
    host, cpus = socket.gethostname(), sorted(os.sched_getaffinity(0))
    channel.send({"rank": launched.rank, "job": launched.name, "pid": os.getpid(), "host": host, "cpus": cpus})
    return channel


def _connect(launched: Joined) -> socket.socket:
    if launched.address is not None:
        stream = socket.create_connection(launched.address, HELLO_S)
        stream.settimeout(None)
        return stream
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.connect(_name(launched))
    except OSError:
        stream.close()
        raise
    return stream


def _watch_machine(stream: socket.socket) -> None:
    """Disable Nagle's algorithm, and let the socket fail if the other machine does not acknowledge for LOST_S."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
    # Keep-alive, because a rank that waits for rank 0's first message sends nothing.
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        stream.setsockopt(socket.IPPROTO_TCP, name, LOST_S // 3)


def addresses(ranks: list[Rank]) -> list[str]:
    """Return the addresses at which ranks 0, 1, ... reach each other: the addresses of their connections to rank 0."""
    if ranks[0].host is None:
        return [LOOPBACK] * (1 + len(ranks))
    ends = [rank.channel.addresses() for rank in ranks]
    first = next((local for local, _ in ends if not local.startswith("127.")), LOOPBACK)
    return [first, *(first if remote.startswith("127.") else remote for _, remote in ends)]


def _name(launched: Joined) -> str:
    """Return the job's name in the abstract socket namespace."""
    return f"\0quintet-{os.getuid()}-{launched.name}"


def _user(stream: socket.socket) -> int:
    credentials = struct.Struct("3i")
    _, uid, _ = credentials.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(uid)

"""Where the other ranks come from: rank 0 starts them, or meets those that torchrun or srun has started."""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from conf.errors import UserError
from conf.schema import ParallelMode, RunConfig
from pipelines.ranks.messages import Channel, Gone

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", "-m", "pipelines.ranks.worker")
MEET_S = 120.0  # for all ranks to be there


@dataclass(frozen=True)
class Joined:
    """A process's place among those that a launcher has started."""

    launcher: str
    rank: int
    size: int
    name: str
    """Of this job on this machine."""


def joined(environment: Mapping[str, str]) -> Joined | None:
    """Return the place of a process that torchrun or srun has started with others; None for one of its own.

    A batch script of Slurm has SLURM_NTASKS, but no SLURM_STEP_NUM_TASKS above 1. Raises UserError for ranks on several machines.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
        rank, size, num_local = (int(environment[name]) for name in names)
        job = [
            environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        ]
        place = Joined("torchrun", rank, size, "-".join(job))
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
        num_local = size if environment.get("SLURM_STEP_NUM_NODES", "1") == "1" else 0
        place = Joined("srun", rank, size, f"{environment['SLURM_JOB_ID']}-{environment['SLURM_STEP_ID']}")
    else:
        return None
    if num_local != size:
        raise UserError(f"{place.launcher} started {size} ranks on several machines: start all of them on one")
    return place if size > 1 else None


def num_ranks(run: RunConfig, place: Joined | None) -> int:
    """Return how many ranks the run has. Raises UserError where a launcher has started another number of processes."""
    parallel = run.parallel
    size = (parallel.tp or (place.size if place else 0)) if parallel.mode is ParallelMode.tp else 1
    if not size:
        raise UserError("parallel.tp is missing: give the number of ranks, such as parallel.tp=2")
    if place is not None and place.size != size:
        given = f"parallel={parallel.mode.name}" if size == 1 else f"parallel.tp={size}"
        raise UserError(
            f"{place.launcher} started {place.size} processes, but {given} has {size}: "
            f"give parallel=tp parallel.tp={place.size}, or start {size}"
        )
    return size


Rank = tuple[int, int, Channel, "subprocess.Popen[bytes] | None"]
"""Another rank: its number, its process's id, the channel to it, and the process where it is a child."""


def spawn(size: int) -> list[Rank]:
    """Start the other ranks on this machine. Each has a socket that it inherits. Raises UserError."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    with ExitStack() as failed:
        ranks: list[Rank] = []
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            try:
                process = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path},
                )
            except OSError as error:
                raise UserError(f"rank {rank} cannot be started: {error}") from error
            finally:
                theirs.close()
            failed.callback(process.kill)
            ranks.append((rank, process.pid, Channel(ours), process))
        failed.pop_all()
    return ranks


def meet(place: Joined) -> list[Rank]:
    """Wait for the ranks that a launcher has started. Raises UserError where they do not come."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(place))
        except OSError as error:
            raise UserError(f"{place.launcher} started two jobs of one name, {place.name}: {error}") from error
        listener.listen(place.size)
        ranks: dict[int, Rank] = {}
        end = time.monotonic() + MEET_S
        while len(ranks) < place.size - 1:
            listener.settimeout(max(end - time.monotonic(), 0.001))
            try:
                stream, _ = listener.accept()
                stream.settimeout(None)
            except TimeoutError as error:
                missing = sorted({*range(1, place.size)} - ranks.keys())
                raise UserError(f"ranks {missing} of {place.launcher} have not come within {MEET_S:g} s") from error
            pid, uid = _peer(stream)
            channel = Channel(stream)
            try:
                rank = channel.receive()[0].get("rank")
            except Gone:
                continue
            if uid == os.getuid() and isinstance(rank, int) and 0 < rank < place.size:
                ranks[rank] = rank, pid, channel, None
    return [ranks[rank] for rank in sorted(ranks)]


def join(place: Joined) -> Channel:
    """Return the channel to rank 0. Raises UserError where it does not come."""
    end = time.monotonic() + MEET_S
    while True:
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(_address(place))
            break
        except OSError as error:
            stream.close()
            if time.monotonic() > end:
                raise UserError(f"rank {place.rank} has not met rank 0 within {MEET_S:g} s") from error
            time.sleep(0.05)
    if _peer(stream)[1] != os.getuid():
        raise UserError(f"another user has taken the name of this job, {place.name}")
    channel = Channel(stream)
    channel.send({"rank": place.rank})
    return channel


def _address(place: Joined) -> str:
    """Return the name of the job's socket, which is in no folder."""
    return f"\0quintet-{os.getuid()}-{place.name}"


def _peer(stream: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    credentials = struct.Struct("3i")
    pid, uid, _ = credentials.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return pid, uid


def cores_of_ranks(size: int, allowed: set[int]) -> list[set[int]]:
    """Return the processors of each rank: cores of its own, neighbours in one NUMA node, where there are enough.

    `allowed`: processors that the run may use.
    """
    cores = _cores(allowed, _siblings, _node)
    if len(cores) < size:
        return [cores[rank % len(cores)] for rank in range(size)]
    borders = [rank * len(cores) // size for rank in range(size + 1)]
    return [set().union(*cores[first:end]) for first, end in zip(borders, borders[1:], strict=False)]


def _cores(allowed: set[int], siblings: Callable[[int], set[int]], node: Callable[[int], int]) -> list[set[int]]:
    """Return the hardware threads of each allowed core, in the order of the NUMA nodes."""
    groups = {frozenset(siblings(cpu) & allowed | {cpu}) for cpu in allowed}
    return sorted((set(group) for group in groups), key=lambda group: (node(min(group)), min(group)))


def _siblings(cpu: int) -> set[int]:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return {cpu}
    found: set[int] = set()
    for part in text.strip().split(","):  # such as 0-1 or 0,64
        first, _, last = part.partition("-")
        found |= {*range(int(first), int(last or first) + 1)}
    return found


def _node(cpu: int) -> int:
    nodes = Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)

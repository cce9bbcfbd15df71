"""Starts the worker ranks, or finds the place of a process that torchrun or srun has started.

Computes the parallel degrees and each rank's cores.
"""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from conf.errors import UserError
from conf.schema import Backend, ParallelConfig, ParallelMode
from conf.support.signals import interrupts_waiting
from pipelines.ranks.messages import Channel

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_PORT = 65535
FEWEST = 2  # default number of ranks or stages, if neither settings nor a launcher give one
COMMAND = (sys.executable, "-P", "-m", "pipelines.loading.worker")
TORCHRUN, SRUN = "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"  # set in every process of the launcher
SLURM_PORT, SLURM_PORTS = 20_000, 10_000  # below Linux's ephemeral ports


@dataclass(frozen=True)
class Joined:
    """A process's place in a job that a launcher has started."""

    launcher: str
    rank: int
    size: int
    name: str
    """The job's name."""
    local_rank: int
    num_local: int
    """`local_rank`: the rank within this machine. `num_local`: number of ranks on this machine."""
    address: tuple[str, int] | None = None
    """Host and port where rank 0 waits for ranks of other machines; None: all ranks are on one machine."""

    def cores(self, allowed: set[int]) -> set[int]:
        """Return this rank's share of the CPUs in `allowed`, which the ranks of its machine divide."""
        return cores_of_ranks(self.num_local, allowed)[self.local_rank]


def joined(environment: Mapping[str, str]) -> Joined | None:
    """Return the place of a process that torchrun or srun has started; None if it runs alone.

    A batch script of Slurm has SLURM_NTASKS, but no SLURM_STEP_NUM_TASKS above 1. Raises UserError if a launcher's
    variables are missing or inconsistent, and for the largest port, which has no next port.
    """
    by_torchrun = TORCHRUN in environment
    launcher, mark = ("torchrun", TORCHRUN) if by_torchrun else ("srun", SRUN)
    try:
        launched = _of_torchrun(environment) if by_torchrun else _of_srun(environment)
        if launched.size == 1:
            return None
        if launched.rank not in range(launched.size) or launched.local_rank not in range(launched.num_local):
            raise ValueError(
                f"rank {launched.rank} of {launched.size}, rank {launched.local_rank} of {launched.num_local} here"
            )
    except (KeyError, ValueError, IndexError) as error:
        problem = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        wrong = f"{mark} is set, but other variables of {launcher} are not as it sets them ({problem})"
        raise UserError(f"{wrong}: start it by {launcher}, or unset {mark}") from error
    if launched.num_local == launched.size:
        return replace(launched, address=None)
    if launched.address is not None and launched.address[1] > MOST_PORT:
        raise UserError(f"--master-port={MOST_PORT} of torchrun has no next port, where ranks meet: give a smaller one")
    return launched


def leave_launcher(environment: MutableMapping[str, str]) -> None:
    """Remove the launcher's marks from `environment`, so that `joined` returns None.

    For a process that starts its own ranks, although a launcher may have started one of its ancestors.
    """
    for mark in (TORCHRUN, SRUN):
        environment.pop(mark, None)


def _of_torchrun(environment: Mapping[str, str]) -> Joined:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    rank, size, local_rank, num_local = (int(environment[name]) for name in names)
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    name = "-".join([environment[TORCHRUN], port, environment.get("TORCHELASTIC_RESTART_COUNT", "")])
    address = host, int(port) + 1  # torchrun's own processes use the port itself
    return Joined("torchrun", rank, size, name, local_rank, num_local, address)


def _of_srun(environment: Mapping[str, str]) -> Joined:
    size = int(environment.get(SRUN, "1"))
    if size <= 1:
        return Joined("srun", 0, 1, "", 0, 1)
    job, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
    num_local = _tasks_of_node(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"]))
    rank, local_rank = int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"])
    address = first_host(environment["SLURM_STEP_NODELIST"]), SLURM_PORT + (int(job) + int(step)) % SLURM_PORTS
    return Joined("srun", rank, size, f"{job}-{step}", local_rank, num_local, address)


def _tasks_of_node(counts: str, node: int) -> int:
    """Return a node's number of tasks from Slurm's notation: 2(x3),1 means 2, 2, 2 and 1."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(",")]
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))][node]


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of nodes, for example of node[03-05,9],other."""
    first = re.sub(r"((?:[^,\[]|\[[^\]]*\])*).*", r"\1", nodes)
    return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first)


def backend_of(requested: Backend, launched: Joined | None, tp: int, num_gpus: int) -> Backend:
    """Return the collective backend, which is never `auto`.

    `requested`: the value of parallel.backend. `num_gpus`: of this machine; 0: ranks compute on CPUs.

    Raises UserError for a backend that the device does not support, for shared memory across machines, and for tensor
    parallelism across machines unless a backend is named.
    """
    fast = Backend.nccl if num_gpus else Backend.shared_memory
    if requested is (Backend.shared_memory if num_gpus else Backend.nccl):
        of, device = ("CPUs", "cuda") if num_gpus else ("GPUs", "cpu")
        raise UserError(f"parallel.backend={requested.name} is of {of}, but this run has device={device}: leave it out")
    if launched is None or launched.address is None:
        return fast if requested is Backend.auto else requested
    where = f"{launched.launcher} started {launched.size} ranks on several machines"
    if requested is Backend.shared_memory:
        raise UserError(f"parallel.backend=shared_memory is of one machine, but {where}: leave it out")
    over = fast if num_gpus else Backend.gloo
    if tp > 1 and requested is Backend.auto:
        raise UserError(
            f"{where}, and parallel.tp={tp} exchanges numbers several times in each layer: give parallel=pp, whose stages do so once in a "
            f"step, or parallel.backend={over.name} for all of it over the network"
        )
    return over if requested is Backend.auto else requested


def check_gpus(num_ranks: int, num_gpus: int) -> None:
    """Raise UserError if a machine has fewer GPUs than ranks. NCCL needs one GPU per rank."""
    if num_ranks > num_gpus:
        raise UserError(
            f"{num_ranks} ranks want a GPU each, but torch sees {num_gpus} here: give fewer ranks, or parallel.backend=gloo, with which "
            "ranks share GPUs, slowly"
        )


def gpu_of(local_rank: int, num_gpus: int, visible: str | None) -> str:
    """Return the CUDA_VISIBLE_DEVICES value that selects the GPU of a rank of this machine.

    `visible`: the process's current value. A launcher may have assigned one GPU already.
    """
    names = [name.strip() for name in visible.split(",")] if visible else [*map(str, range(num_gpus))]
    return names[local_rank % len(names)]


def degrees(parallel: ParallelConfig, launched: Joined | None) -> tuple[int, int]:
    """Return tp and pp.

    Raises UserError if a launcher has started a number of processes other than tp * pp.
    """
    started = launched.size if launched else None
    tp, pp = 1, 1
    match parallel.mode:
        case ParallelMode.tp:
            tp = parallel.tp or started or FEWEST
        case ParallelMode.pp:
            pp = parallel.pp or started or FEWEST
        case ParallelMode.tp_pp:
            tp, pp = parallel.tp or FEWEST, parallel.pp or FEWEST
    if launched is not None and launched.size != tp * pp:
        numbers = [f"parallel.{name}={number}" for name, number in (("tp", tp), ("pp", pp)) if number > 1]
        fitting = "tp" if launched.address is None else "pp"
        raise UserError(
            f"{launched.launcher} started {launched.size} processes, but {' '.join(numbers) or f'parallel={parallel.mode.name}'} has "
            f"{tp * pp}: give parallel={fitting} parallel.{fitting}={launched.size}, or start {tp * pp}"
        )
    return tp, pp


def refuse_launched_server(launched: Joined | None) -> None:
    """Raise UserError if a launcher has started this process, which is a server's."""
    if launched is not None:
        problem = f"the server loads its model again where a rank is lost, which {launched.launcher} cannot start again"
        raise UserError(f"{problem}: run it without {launched.launcher}, and it starts its ranks itself")


@dataclass(frozen=True)
class Rank:
    """A worker rank's process, started by rank 0 or by a launcher."""

    rank: int
    pid: int
    channel: Channel
    process: "subprocess.Popen[bytes] | None" = None
    """None if a launcher started it."""
    host: str | None = None
    """Its machine; None if all ranks are on one machine."""
    cpus: frozenset[int] = frozenset()
    """CPUs that it may use, if a launcher started it."""

    @property
    def name(self) -> str:
        where = "" if self.host is None else f" on {self.host}"
        return f"rank {self.rank} (process {self.pid}{where})"


def spawn(size: int) -> list[Rank]:
    """Start the worker ranks on this machine. Each inherits one end of a socket pair. Raises UserError."""
    with ExitStack() as passed, interrupts_waiting():  # workers inherit the blocked signals until they ignore them
        pairs = [socket.socketpair() for _ in range(1, size)]
        for _, worker_end in pairs:
            passed.enter_context(worker_end)
        started: Future[list[subprocess.Popen[bytes]]] = Future()
        fds = [worker_end.fileno() for _, worker_end in pairs]
        threading.Thread(target=_start_and_wait, args=(fds, started), daemon=True).start()
        processes = started.result()
    return [
        Rank(rank, process.pid, Channel(driver_end), process)
        for rank, ((driver_end, _), process) in enumerate(zip(pairs, processes, strict=True), 1)
    ]


def _start_and_wait(fds: list[int], started: "Future[list[subprocess.Popen[bytes]]]") -> None:
    """Start a worker for each socket, and wait for their end.

    It runs in its own thread until they end, because Linux kills the workers (parent death signal) when the thread that
    started them ends.
    """
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for fd in fds:
            process = subprocess.Popen(
                [*COMMAND, str(fd), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(fd,),
                env={**os.environ, "PYTHONPATH": path},
            )
            processes.append(process)
    except BaseException as error:
        for process in processes:
            process.kill()
        if isinstance(error, OSError):
            error = UserError(f"rank {len(processes) + 1} cannot be started: {error}")
        started.set_exception(error)
    else:
        started.set_result(processes)
    for process in processes:
        process.wait()


def cores_of_ranks(size: int, allowed: set[int]) -> list[set[int]]:
    """Return the CPUs of each rank: separate cores, adjacent in one NUMA node; shared cores if there are fewer cores
    than ranks.

    `allowed`: CPUs that the run may use.
    """
    cores = cores_in_order(allowed)
    if len(cores) < size:
        return [cores[rank % len(cores)] for rank in range(size)]
    borders = [rank * len(cores) // size for rank in range(size + 1)]
    return [set().union(*cores[first:end]) for first, end in zip(borders, borders[1:], strict=False)]


def bound(ranks: Sequence[tuple[str | None, Set[int]]]) -> list[bool]:
    """Return for each rank whether its launcher has bound it to CPUs that no other rank of its machine may use.

    `ranks`: the machine and the CPUs of each rank.
    """
    numbered = list(enumerate(ranks))
    return [
        not any(
            its_host == host and its_cpus & cpus for other_rank, (its_host, its_cpus) in numbered if other_rank != rank
        )
        for rank, (host, cpus) in numbered
    ]


def cores_in_order(allowed: set[int]) -> list[set[int]]:
    """Return the hardware threads of each core that the run may use, ordered by NUMA node."""
    return _cores(allowed, _siblings, _node)


def _cores(allowed: set[int], siblings: Callable[[int], set[int]], node: Callable[[int], int]) -> list[set[int]]:
    groups = {frozenset(siblings(cpu) & allowed | {cpu}) for cpu in allowed}
    return sorted((set(group) for group in groups), key=lambda group: (node(min(group)), min(group)))


def _siblings(cpu: int) -> set[int]:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return {cpu}
    cpus: set[int] = set()
    for part in text.strip().split(","):  # such as 0-1 or 0,64
        first, _, last = part.partition("-")
        cpus |= {*range(int(first), int(last or first) + 1)}
    return cpus


def _node(cpu: int) -> int:
    nodes = Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(node.name.removeprefix("node")) for node in nodes), default=0)

"""The driver, rank 0. It loads its shard while the workers load their shards.

It sends each operation to the workers, then computes its own share of the operation.
"""

import os
import socket
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Backend, DeviceConfig, DeviceType, ParallelConfig
from kernels import build
from kernels.collectives.gloo import Gloo
from kernels.collectives.torch_group import serve_addresses
from kernels.threads import set_threads, use_cores
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from pipelines.engine.executor import Executor, Operation
from pipelines.engine.operations import Execute
from pipelines.engine.steps import StepOutputs
from pipelines.loading.fingerprint import common_fingerprint, plain
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.rank_operations import Count, Counts, MakeExecutor
from pipelines.loading.shard_plan import check_plan, shard_plan
from pipelines.ranks.control import Worker, Workers
from pipelines.ranks.encoding import result_type
from pipelines.ranks.launch import (
    Joined,
    Rank,
    backend_of,
    bound,
    check_gpus,
    cores_of_ranks,
    degrees,
    joined,
    spawn,
)
from pipelines.ranks.messages import Gone, Header
from pipelines.ranks.rank_context import RankContext, create_memory, layout_of, shared_memory_context, torch_context
from pipelines.ranks.rendezvous import addresses, await_ranks

T = TypeVar("T")


@dataclass
class _PendingOperation:
    """An operation in flight. Its result comes from the last pipeline stage."""

    kind: Any
    """The result's type."""
    result: Any = None


class Driver:
    """Rank 0's side of a model that several ranks run."""

    def __init__(self, workers: Workers, cpus: set[int]) -> None:
        """`cpus`: the CPU affinity before the run, which is restored at the end."""
        self.workers, self.context = workers, workers.context
        self.pending: deque[_PendingOperation] = deque()
        """Operations whose results have not arrived yet, oldest first. Operations of an earlier executor are included."""
        self.close = weakref.finalize(self, _end, workers, cpus)
        """Ends the workers. Also runs when this object is garbage-collected."""

    def part(self, plan: ModelPlan) -> ModelPlan:
        """Return the plan of rank 0's shard. Raises UserError as `shard_plan` does."""
        return shard_plan(plan, self.context.parallel_layout, self.context.group, self.context.neighbours)

    def fewest_blocks(self, own: int) -> int:
        """Return how many KV cache blocks fit on every rank.

        `own`: the number that fits on rank 0. Raises RankLost if a rank cannot load its shard.
        """
        return min(own, *self.workers.answers(int))

    def executor(
        self, model: CausalLM, cache: KVCache, num_graph_sequences: int, table_width: int, decode_threads: int | None
    ) -> Executor:
        return DriverExecutor(self, model, cache, num_graph_sequences, table_width, decode_threads)


def _end(workers: Workers, cpus: set[int]) -> None:
    workers.close()
    use_cores(cpus)


def start_driver(whole: ModelPlan, parallel: ParallelConfig, options: DeviceConfig) -> Driver:
    """Start the worker ranks, or wait for the ranks that a launcher started. Tell each worker what to load.

    `whole`: the plan of the unsharded model. Raises UserError if the ranks are not available.
    """
    source, num_gpus = whole.source, torch.cuda.device_count() if whole.device.type == "cuda" else 0
    library = build.library()
    if library is None and not num_gpus:
        what = "needs the C++ kernels, which are off: give them, or parallel=single"
        raise UserError(f"parallel={parallel.mode.name} {what}")
    launched = _launched()
    (tp, pp), cpus = degrees(parallel, launched), os.sched_getaffinity(0)
    backend = backend_of(parallel.backend, launched, tp, num_gpus)
    if launched is None:
        check_plan(whole, layout_of(0, tp, pp, parallel))
        if backend is Backend.nccl:
            check_gpus(tp * pp, num_gpus)
    ranks = spawn(tp * pp) if launched is None else await_ranks(launched)
    cores = _cores(launched, ranks, cpus)
    # If all ranks are on this machine, rank 0 has verified the files for all of them.
    is_near = launched is None or launched.address is None
    start = {
        "tp": tp,
        "pp": pp,
        "num_local": launched.num_local if launched else tp * pp,
        "num_gpus": num_gpus,
        "backend": backend.name,
        "head": source.architecture.head.name,
        "packed": whole.packed,
        **_model_to_load(whole, parallel, options, verify=whole.options.verify and not is_near),
    }
    starts = [
        start | {"rank": rank.rank, "local_rank": rank.rank, "name": rank.name, "cores": cores[rank.rank]}
        for rank in ranks
    ]
    if backend is not Backend.shared_memory:
        common = common_fingerprint(source.checkpoint.path)
        own = _begin_in_groups(parallel, ranks, [start | {"common": common} for start in starts])
    else:
        assert library is not None
        num_cpus = len(cpus.union(*(rank.cpus for rank in ranks)))
        own = _begin_in_memory(parallel, library, ranks, starts, spins=num_cpus >= tp * pp)
    use_cores(cores[0] or (launched.cores(cpus) if launched else cpus))
    if library is not None:
        torch.set_num_threads(options.threads or library.get_threads())
    set_threads(options.threads)
    workers = [Worker(rank.rank, rank.name, rank.channel, rank.process) for rank in ranks]
    return Driver(Workers(workers, own, parallel.heartbeat_s), cpus)


def _model_to_load(whole: ModelPlan, parallel: ParallelConfig, options: DeviceConfig, verify: bool) -> Header:
    """Return the part of a worker's first message that says which model it loads, and how."""
    groups: dict[str, Any] = {
        "model": replace(whole.options, verify=verify),
        "quant": whole.quant,
        "parallel": parallel,
        "device": replace(options, type=DeviceType[whole.device.type]),  # replaces auto, so that all ranks use one type
    }
    predicts_ahead = whole.source.shape.capabilities.predicts_ahead
    return {"predicts_ahead": predicts_ahead} | {name: plain(asdict(group)) for name, group in groups.items()}


def _launched() -> Joined | None:
    """Return rank 0's place in a launcher's job; None without a launcher.

    Raises UserError if the launcher started this process as another rank.
    """
    launched = joined(os.environ)
    if launched is not None and launched.rank > 0:
        what = f"{launched.launcher} has started this script {launched.size} times, but a model in Python starts its ranks itself"
        raise UserError(f"{what}: run it without {launched.launcher}")
    return launched


def _cores(launched: Joined | None, ranks: list[Rank], cpus: set[int]) -> list[list[int] | None]:
    """Return the CPUs of each rank, rank 0 first. Rank 0 may use `cpus`.

    A rank gets None if the launcher has not bound it to CPUs of its own. Ranks of one machine then divide its CPUs.
    """
    if launched is None:
        return [*map(sorted, cores_of_ranks(1 + len(ranks), cpus))]
    host = None if launched.address is None else socket.gethostname()
    everyone = [(host, cpus), *((rank.host, rank.cpus) for rank in ranks)]
    return [sorted(own) if alone else None for (_, own), alone in zip(everyone, bound(everyone), strict=True)]


def _begin_in_memory(
    parallel: ParallelConfig, library: build.Library, ranks: list[Rank], starts: list[Header], spins: bool
) -> RankContext:
    tp, pp = starts[0]["tp"], starts[0]["pp"]
    fd = create_memory(library, tp, pp)
    try:
        for rank, start in zip(ranks, starts, strict=True):
            with suppress(Gone):  # the watcher thread reports the reason
                rank.channel.send(start | {"spins": spins})
                rank.channel.send_file(fd)
        return shared_memory_context(library, fd, layout_of(0, tp, pp, parallel), spins)
    finally:
        os.close(fd)


def _begin_in_groups(parallel: ParallelConfig, ranks: list[Rank], starts: list[Header]) -> RankContext:
    own, *others = addresses(ranks)
    server = serve_addresses(own)
    for rank, start, address in zip(ranks, starts, others, strict=True):
        with suppress(Gone):  # the watcher thread reports the reason
            rank.channel.send(start | {"store": [own, server.port], "address": address})
    start = starts[0]
    parallel_layout = layout_of(0, start["tp"], start["pp"], parallel)
    local = start["num_local"], start["num_gpus"]
    return torch_context(Backend[start["backend"]], (own, server.port), own, parallel_layout, *local, server)


class DriverExecutor(Executor):
    """Computes rank 0's share of each step while the workers compute theirs."""

    def __init__(
        self,
        driver: Driver,
        model: CausalLM,
        cache: KVCache,
        num_graph_sequences: int,
        table_width: int,
        decode_threads: int | None,
    ) -> None:
        self.driver, self._workers = driver, driver.workers
        groups = driver.context.group, *driver.context.neighbours
        if any(isinstance(group, Gloo) for group in groups):
            num_graph_sequences = 0  # a CUDA graph cannot capture gloo's transfers through the CPU
        self._workers.tell(MakeExecutor(len(cache.tensors[0]), num_graph_sequences, table_width))
        super().__init__(model, cache, num_graph_sequences, table_width, decode_threads)
        tp, pp = driver.context.parallel_layout.tp, driver.context.parallel_layout.pp
        self._answering = tp * (pp - 1) if pp > 1 else None
        """The worker rank that returns results; None if rank 0 computes them itself."""
        self.num_microbatches = pp
        self._pending = driver.pending

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + sum(counts.weight_bytes for counts in self._other_ranks_counts())

    def step_weight_bytes(self, num_sequences: int) -> float:
        return super().step_weight_bytes(num_sequences) + sum(
            counts.step_weight_bytes for counts in self._other_ranks_counts(num_sequences)
        )

    @property
    def other_ranks_peak_bytes(self) -> int:
        return sum(counts.peak_memory_bytes for counts in self._other_ranks_counts())

    @property
    def kv_bytes_per_token(self) -> int:
        return super().kv_bytes_per_token + sum(counts.kv_bytes_per_token for counts in self._other_ranks_counts())

    def execute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        if token_ids is not None:
            batch.token_ids.copy_(token_ids)  # the batch is sent to workers, which do not have these tokens
        return self.run(Execute(batch))

    def run(self, operation: Operation[T]) -> T:
        return self.begin(operation)()

    def begin(self, operation: Operation[T]) -> Callable[[], T]:
        """Broadcast an operation and run rank 0's share. Raises RankLost if another rank failed."""
        kind = result_type(operation)
        answering = () if self._answering is None or kind is NoneType else (self._answering,)
        self._workers.tell(operation, answering)
        own = self._workers.meanwhile(partial(operation.compute, self))
        if not answering:
            return lambda: own
        pending = _PendingOperation(kind)
        self._pending.append(pending)
        return partial(self._wait_for, pending)

    def _wait_for(self, pending: _PendingOperation) -> Any:
        while pending.result is None:
            self._receive_oldest()
        return pending.result

    def _receive_oldest(self) -> None:
        """Receive the result of the oldest operation in flight. Results arrive in the order of the operations."""
        assert self._answering is not None
        pending = self._pending[0]
        pending.result = self._workers.answer_of(self._answering, pending.kind, self.device)
        self._pending.popleft()

    def _other_ranks_counts(self, num_sequences: int = 1) -> list[Counts]:
        """Return the counts of the worker ranks. Receives the results of operations in flight first."""
        while self._pending:
            self._receive_oldest()
        self._workers.tell(Count(num_sequences), answering=range(1, self.driver.context.size))
        return self._workers.answers(Counts)

"""Rank 0: it loads the model with the others, and before each step it tells them what to compute."""

import os
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import RunConfig
from conf.tasks import SweepConfig
from kernels import build
from kernels.collectives import Group
from kernels.collectives.shared_memory import SharedMemory, create_shared_memory
from kernels.threads import set_threads, use_cores
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from models.cuts import Division
from pipelines.engine.runner import Runner
from pipelines.engine.steps import StepOutputs
from pipelines.fingerprint import plain
from pipelines.opening import ModelSource
from pipelines.planning import ModelPlan, divide_plan
from pipelines.ranks.control import Worker, Workers
from pipelines.ranks.launch import cores_of_ranks, joined, meet, num_ranks, spawn
from pipelines.ranks.messages import Gone, Header

T = TypeVar("T")


class Leader:
    """Rank 0's place among ranks that load and run one model."""

    def __init__(self, group: Group, workers: Workers, cpus: set[int]) -> None:
        """`cpus`: those that the process had before."""
        self.group, self.size = group, group.size
        self.workers, self._cpus = workers, cpus

    def part(self, plan: ModelPlan) -> ModelPlan:
        """Return the plan of rank 0's part. Raises UserError as `divide_plan` does."""
        return divide_plan(plan, Division(self.size), self.group)

    def fewest_blocks(self, own: int) -> int:
        """Return how many blocks of the KV cache all ranks have memory for. Raises RankLost where one cannot load its part."""
        return min(own, *(int(answer["num_blocks"]) for answer in self.workers.answers()))

    def runner(
        self, model: CausalLM, cache: KVCache, num_graph_sequences: int, table_width: int, decode_threads: int | None
    ) -> Runner:
        """Return the runner of rank 0's part, with which the other ranks end."""
        runner = LeadingRunner(self, model, cache, num_graph_sequences, table_width, decode_threads)
        weakref.finalize(runner, self.close)
        return runner

    def close(self) -> None:
        """End the other ranks."""
        self.workers.close()
        use_cores(self._cpus)


def lead(run: RunConfig, source: ModelSource, device: torch.device) -> Leader:
    """Begin to load the model of `run` in its other ranks, each on cores of its own. Raises UserError where they cannot be had."""
    library = build.library()
    if device.type != "cpu" or library is None:
        missing = "the C++ kernels, which are off" if device.type == "cpu" else "device=cpu"
        raise UserError(f"parallel={run.parallel.mode.name} needs {missing}: give them, or parallel=single")
    place = joined(os.environ)
    size, cpus = num_ranks(run, place), os.sched_getaffinity(0)
    cores = cores_of_ranks(size, cpus)
    spins = len(set().union(*cores)) >= size
    fd = create_shared_memory(library, size)
    try:
        group = SharedMemory(library, fd, 0, size, spins)
        workers = [Worker(*rank) for rank in (spawn(size) if place is None else meet(place))]
        start = {
            "size": size,
            "spins": spins,
            "head": source.architecture.head.name,
            "run": plain(asdict(replace(run, sweep=SweepConfig()))),
        }
        for worker in workers:
            try:
                worker.channel.send({**start, "rank": worker.rank, "cores": sorted(cores[worker.rank])})
                worker.channel.send_file(fd)
            except Gone:  # the watcher says why
                continue
    finally:
        os.close(fd)
    use_cores(cores[0])
    torch.set_num_threads(run.device.threads or library.get_threads())
    set_threads(run.device.threads)
    return Leader(group, Workers(workers, group, run.parallel.heartbeat_s), cpus)


class LeadingRunner(Runner):
    """Computes rank 0's part of each step, while the other ranks compute theirs."""

    def __init__(
        self,
        leader: Leader,
        model: CausalLM,
        cache: KVCache,
        num_graph_sequences: int,
        table_width: int,
        decode_threads: int | None,
    ) -> None:
        super().__init__(model, cache, num_graph_sequences, table_width, decode_threads)
        self.leader, self._workers = leader, leader.workers
        sizes = {"num_blocks": len(cache.tensors[0]), "table_width": table_width}
        self._workers.tell({"op": "begin", **sizes})

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            self._led({"op": "copy_blocks", "copies": copies}, [], partial(super().copy_blocks, copies))

    def execute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        return self._led({"op": "execute"}, [batch], partial(super().execute, batch, token_ids))

    def execute_whole(self, batch: Batch, whole: Batch) -> tuple[StepOutputs, Tensor]:
        return self._led({"op": "execute_whole"}, [batch, whole], partial(super().execute_whole, batch, whole))

    def hidden(self, batch: Batch) -> Tensor:
        return self._led({"op": "hidden"}, [batch], partial(super().hidden, batch))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._led({"op": "logits", "size": hidden.shape}, [], partial(super().logits, hidden), hidden)

    def _led(self, header: Header, batches: list[Batch], compute: Callable[[], T], hidden: Tensor | None = None) -> T:
        """Return what rank 0 computes while the others do what the message says. Raises RankLost where it does not count."""
        header["shapes"] = [batch.shape for batch in batches]
        tensors = [batch.numbers for batch in batches] if hidden is None else [hidden]
        content = b"".join(
            tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor.numel()
        )
        self._workers.tell(header, content)
        try:
            result = compute()
        except BaseException:
            self._workers.check()
            self._workers.abort()  # the others may wait for this rank
            raise
        self._workers.check()
        return result

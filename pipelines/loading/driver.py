"""The driver, rank 0. It loads its shard while the workers load their shards (`start_driver.py` starts them).

It sends each operation to the workers, then computes its own share of the operation.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.collectives.gloo import Gloo
from kernels.threads import use_cores
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from pipelines.engine.adapters import AdapterChange, LoadAdapter
from pipelines.engine.executor import Executor, Operation
from pipelines.engine.kv_cache import CacheRoom
from pipelines.engine.operations import Execute
from pipelines.engine.steps import StepOutputs
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.rank_operations import Count, Counts, LoadedAdapter, MakeExecutor
from pipelines.loading.shard_plan import shard_plan
from pipelines.ranks.control import Workers
from pipelines.ranks.encoding import result_type

T = TypeVar("T")


@dataclass
class _PendingOperation:
    """An operation in flight. Its result comes from the last pipeline stage."""

    kind: Any
    """The result's type."""
    device: torch.device
    result: Any = None


class Driver:
    """Rank 0's side of a model that several ranks run."""

    def __init__(self, workers: Workers, cpus: set[int]) -> None:
        """`cpus`: the CPU affinity before the run, which is restored at the end."""
        self.workers, self.context = workers, workers.context
        self.pending: deque[_PendingOperation] = deque()
        """Operations whose results have not arrived yet, oldest first. Operations of an earlier executor are included."""
        self._rooms: list[CacheRoom] | None = None
        tp, pp = self.context.parallel_layout.tp, self.context.parallel_layout.pp
        self.answering = tp * (pp - 1) if pp > 1 else None
        """The worker rank that returns results; None if rank 0 computes them itself."""
        self.close = weakref.finalize(self, _end, workers, cpus)
        """Ends the workers. Also runs when this object is garbage-collected."""

    def part(self, plan: ModelPlan) -> ModelPlan:
        """Return the plan of rank 0's shard. Raises UserError as `shard_plan` does."""
        return shard_plan(plan, self.context.parallel_layout, self.context.group, self.context.neighbours)

    def other_rooms(self) -> list[CacheRoom]:
        """Return the other ranks' memory for their caches. Raises RankLost if a rank cannot load its shard."""
        if self._rooms is None:  # the first answers of the workers
            self._rooms = self.workers.answers(CacheRoom)
        return self._rooms

    def change_adapters(self, change: AdapterChange) -> None:
        """Repeat a change on the workers, and wait until they have read a new adapter.

        Raises UserError if a worker cannot load the adapter, and RankLost.
        """
        if not isinstance(change, LoadAdapter):
            self.workers.tell(change)
            return
        self.other_rooms()
        self.receive_pending()
        self.workers.tell(change, answering=range(1, self.context.size))
        if errors := [loaded.error for loaded in self.workers.answers(LoadedAdapter) if loaded.error]:
            raise UserError(errors[0])

    def receive_oldest(self) -> None:
        """Receive the result of the oldest operation in flight. Results arrive in the order of the operations."""
        assert self.answering is not None
        pending = self.pending[0]
        pending.result = self.workers.answer_of(self.answering, pending.kind, pending.device)
        self.pending.popleft()

    def receive_pending(self) -> None:
        """Receive the results of all operations in flight, which arrive before later answers."""
        while self.pending:
            self.receive_oldest()

    def executor(
        self, model: CausalLM, cache: KVCache, num_graph_sequences: int, table_width: int, decode_threads: int | None
    ) -> Executor:
        return DriverExecutor(self, model, cache, num_graph_sequences, table_width, decode_threads)


def _end(workers: Workers, cpus: set[int]) -> None:
    workers.close()
    use_cores(cpus)


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
        sizes = cache.num_blocks, cache.num_slots, cache.num_window_blocks
        self._workers.tell(MakeExecutor(*sizes, num_graph_sequences, table_width))
        super().__init__(model, cache, num_graph_sequences, table_width, decode_threads)
        self.num_microbatches = driver.context.parallel_layout.pp

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
        last = self.driver.answering
        answering = () if last is None or kind is NoneType else (last,)
        self._workers.tell(operation, answering)
        result = self._workers.meanwhile(partial(operation.compute, self))
        if not answering:
            return lambda: result
        pending = _PendingOperation(kind, self.device)
        self.driver.pending.append(pending)
        return partial(self._wait_for, pending)

    def _wait_for(self, pending: _PendingOperation) -> Any:
        while pending.result is None:
            self.driver.receive_oldest()
        return pending.result

    def _other_ranks_counts(self, num_sequences: int = 1) -> list[Counts]:
        """Return the counts of the worker ranks."""
        self.driver.receive_pending()
        self._workers.tell(Count(num_sequences), answering=range(1, self.driver.context.size))
        return self._workers.answers(Counts)

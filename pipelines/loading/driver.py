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

from torch import Tensor

from kernels.collectives.gloo import Gloo
from kernels.threads import use_cores
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from pipelines.engine.executor import Executor, Operation
from pipelines.engine.kv_cache import CacheRoom
from pipelines.engine.operations import Execute
from pipelines.engine.steps import StepOutputs
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.rank_operations import Count, Counts, MakeExecutor
from pipelines.loading.shard_plan import shard_plan
from pipelines.ranks.control import Workers
from pipelines.ranks.encoding import result_type

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

    def other_rooms(self) -> list[CacheRoom]:
        """Return the other ranks' memory for their caches. Raises RankLost if a rank cannot load its shard."""
        return self.workers.answers(CacheRoom)

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
        result = self._workers.meanwhile(partial(operation.compute, self))
        if not answering:
            return lambda: result
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

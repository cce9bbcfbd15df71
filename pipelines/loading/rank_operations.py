"""Operations that rank 0 sends to the workers in addition to `pipelines/engine/operations.py`."""

from dataclasses import dataclass

from pipelines.engine.executor import Executor, Operation
from pipelines.jobs.report import peak_memory_bytes


@dataclass(frozen=True)
class MakeExecutor:
    """Create or replace the executor. A new executor keeps the cache and drops recorded steps."""

    num_blocks: int
    num_state_slots: int
    num_window_blocks: int
    num_graph_sequences: int
    table_width: int


@dataclass(frozen=True)
class LoadedAdapter:
    """A worker's answer to `LoadAdapter`."""

    error: str | None
    """The reason why this rank does not have the adapter."""


@dataclass(frozen=True)
class Counts:
    """The counts of a rank's executor and process."""

    weight_bytes: int
    step_weight_bytes: float
    kv_bytes_per_token: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class Count(Operation[Counts]):
    num_sequences: int
    """The sequences of the step whose `step_weight_bytes` are counted."""

    def compute(self, executor: Executor) -> Counts:
        return Counts(
            executor.weight_bytes,
            executor.step_weight_bytes(self.num_sequences),
            executor.kv_bytes_per_token,
            peak_memory_bytes(executor.device),
        )

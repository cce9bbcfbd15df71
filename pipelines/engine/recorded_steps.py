"""CPU steps with recurring shapes: computed eagerly at first, then recorded, and replayed from then on."""

from dataclasses import dataclass

from torch import Tensor

from kernels.capture import Graph, capture
from models.batch import Batch, BatchShape
from pipelines.engine.steps import StepOutputs, Steps

MAX_COUNTED_SHAPES = 256  # maximum number of shapes that are counted but not recorded
MAX_BYTES = 2**27  # memory of recorded steps: 22 MB for 16 tokens of 1.1 B parameters, 60 kB for 1 token of models/tiny


@dataclass(frozen=True)
class RecordedStep:
    """A recording with its inputs and outputs. Every replay reads and writes their memory."""

    graph: Graph
    inputs: Batch
    outputs: StepOutputs


class RecordedSteps:
    """Replays steps of the most recently used shapes. A model that cannot be recorded is computed eagerly."""

    def __init__(self, compute: Steps, max_tokens: int, times_before: int, max_bytes: int = MAX_BYTES) -> None:
        """Records steps of at most `max_tokens` tokens whose shape was computed `times_before` times.

        If all recordings take more than `max_bytes`, the least recently used are dropped. The newest recording always
        stays.
        """
        self._compute = compute
        self._max_tokens = max_tokens
        self._times_before = times_before
        self._max_bytes = max_bytes
        self._steps: dict[BatchShape, RecordedStep] = {}  # least recently used first
        self._num_bytes = 0
        self._times: dict[BatchShape, int] = {}  # how often each shape was computed, least recently computed first
        self.can_record = True
        """False after the model did an operation that cannot be recorded."""

    @property
    def shapes(self) -> list[BatchShape]:
        """Recorded shapes, least recently used first."""
        return list(self._steps)

    def __call__(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        step = self._steps.pop(batch.shape, None)
        if step is None:
            return self._compute_or_record(batch, token_ids)
        self._steps[batch.shape] = step
        step.inputs.numbers.copy_(batch.numbers)
        if token_ids is not None:
            step.inputs.token_ids.copy_(token_ids)
        step.graph.replay()
        return step.outputs

    def _compute_or_record(self, batch: Batch, token_ids: Tensor | None) -> StepOutputs:
        if not self.can_record or batch.shape.num_tokens > self._max_tokens:
            return self._compute(batch, token_ids)
        times = self._times.pop(batch.shape, 0)
        if times >= self._times_before:
            return self._record(batch, token_ids)
        self._times[batch.shape] = times + 1
        if len(self._times) > MAX_COUNTED_SHAPES:
            del self._times[next(iter(self._times))]
        return self._compute(batch, token_ids)

    def _record(self, batch: Batch, token_ids: Tensor | None) -> StepOutputs:
        if token_ids is not None:
            batch.token_ids.copy_(token_ids)
        graph, outputs = capture(lambda: self._compute(batch, None))
        if graph is None:
            self.can_record = False
            return outputs
        self._steps[batch.shape] = RecordedStep(graph, batch, outputs)
        self._num_bytes += graph.num_bytes
        while self._num_bytes > self._max_bytes and len(self._steps) > 1:
            self._num_bytes -= self._steps.pop(next(iter(self._steps))).graph.num_bytes
        return outputs

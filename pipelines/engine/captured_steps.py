"""Steps on a CPU whose shapes come again: computed at first, then captured, and replayed from then on.

R output rows, E hidden channels, V tokens in the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from kernels.capture import Graph, capture
from models.batch import Batch, BatchShape

Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Hidden states [R, E], logits [R, V], and whether these are all finite."""

MAX_SHAPES = 4  # that are known; a captured one has the memory of a step


@dataclass(frozen=True)
class CapturedStep:
    """A step with its inputs and outputs, whose memory every replay reads and writes."""

    graph: Graph
    inputs: Batch
    outputs: Outputs

    def run(self, batch: Batch) -> Outputs:
        self.inputs.numbers.copy_(batch.numbers)
        self.graph.replay()
        return self.outputs


class CapturedSteps:
    """Those of the shapes that were used last. A model that cannot be captured computes every time."""

    def __init__(self, compute: Callable[[Batch], Outputs], max_tokens: int, times_before: int = 0) -> None:
        """Captures steps of at most `max_tokens` tokens, whose shape was computed `times_before`."""
        self._compute = compute
        self._max_tokens = max_tokens
        self._times_before = times_before
        self._can_capture = True
        # The last used one last; a number: how often it was computed.
        self._steps: dict[BatchShape, CapturedStep | int] = {}

    def run(self, batch: Batch) -> Outputs:
        """They are overwritten by the next call."""
        if not self._can_capture or batch.shape.num_tokens > self._max_tokens:
            return self._compute(batch)
        step = self._steps.pop(batch.shape, 0)
        if isinstance(step, CapturedStep):
            outputs = step.run(batch)
        elif step < self._times_before:
            step, outputs = step + 1, self._compute(batch)
        else:
            step, outputs = self._capture(batch)
        self._steps[batch.shape] = step
        if len(self._steps) > MAX_SHAPES:
            del self._steps[next(iter(self._steps))]
        return outputs

    def _capture(self, batch: Batch) -> tuple[CapturedStep | int, Outputs]:
        graph, outputs = capture(lambda: self._compute(batch))
        self._can_capture = graph is not None
        return (CapturedStep(graph, batch, outputs) if graph else 0), outputs

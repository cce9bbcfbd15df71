"""The step that gives each sequence one token: captured when its shape is seen first, replayed from then on.

S sequences, E hidden channels, V tokens in the vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from kernels.capture import Graph, capture
from models.batch import Batch, BatchShape

Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Hidden states [S, E], logits [S, V], and whether these are all finite."""

MAX_CAPTURED = 4  # shapes; each has the memory of one step
MAX_SEQUENCES = 16  # of a captured step: larger ones take so long that the calls do not count


@dataclass(frozen=True)
class DecodeStep:
    """A captured step with its inputs and outputs, whose memory every replay reads and writes."""

    graph: Graph
    inputs: Batch
    outputs: Outputs

    def run(self, batch: Batch) -> Outputs:
        self.inputs.numbers.copy_(batch.numbers)
        self.graph.replay()
        return self.outputs


class DecodeSteps:
    """Those of the shapes that were used last. A model that cannot be captured computes every time."""

    def __init__(self, compute: Callable[[Batch], Outputs]) -> None:
        self._compute = compute
        self._can_capture = True
        self._steps: OrderedDict[BatchShape, DecodeStep] = OrderedDict()

    def run(self, batch: Batch) -> Outputs:
        """They are overwritten by the next call."""
        if not self._can_capture or batch.shape.num_sequences > MAX_SEQUENCES:
            return self._compute(batch)
        if step := self._steps.get(batch.shape):
            self._steps.move_to_end(batch.shape)
            return step.run(batch)
        graph, outputs = capture(lambda: self._compute(batch))
        if graph is None:
            self._can_capture = False
        else:
            self._steps[batch.shape] = DecodeStep(graph, batch, outputs)
            if len(self._steps) > MAX_CAPTURED:
                self._steps.popitem(last=False)
        return outputs

"""The step that gives each sequence one token: captured when its shape is seen first, replayed from then on.

S sequences, E hidden channels, V tokens in the vocabulary.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from kernels.capture import Graph, capture
from models.batch import Batch

MAX_CAPTURED = 8  # shapes; each has the memory of one step


@dataclass(frozen=True)
class DecodeStep:
    """A captured step with its inputs and outputs, whose memory every replay reads and writes."""

    graph: Graph
    inputs: Batch
    hidden: Tensor  # [S, E]
    logits: Tensor  # [S, V]

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        for field in fields(Batch):
            getattr(self.inputs, field.name).copy_(getattr(batch, field.name))
        self.graph.replay()
        return self.hidden, self.logits


class DecodeSteps:
    """Those of the shapes that were used last. A model that cannot be captured computes every time."""

    def __init__(self, compute: Callable[[Batch], tuple[Tensor, Tensor]]) -> None:
        """`compute`: hidden states and logits of a batch's output rows."""
        self._compute = compute
        self._can_capture = True
        self._steps: OrderedDict[tuple[int, ...], DecodeStep] = OrderedDict()

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states [S, E] and logits [S, V], until the next call."""
        if not self._can_capture:
            return self._compute(batch)
        shape = tuple(batch.block_tables.shape)
        if step := self._steps.get(shape):
            self._steps.move_to_end(shape)
            return step.run(batch)
        graph, (hidden, logits) = capture(lambda: self._compute(batch))
        if graph is None:
            self._can_capture = False
        else:
            self._steps[shape] = DecodeStep(graph, batch, hidden, logits)
            if len(self._steps) > MAX_CAPTURED:
                self._steps.popitem(last=False)
        return hidden, logits

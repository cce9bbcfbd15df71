"""The graph of a traced step, as a list of function calls. An exported model runs it instead of the model's code.

E hidden channels, V vocabulary, R output rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conf.errors import shortened
from models.batch import WINDOW_FIELDS, Batch, BatchShape, KVCache
from models.causal_lm import CausalLM

ADAPTERS = "adapter_slots"
STATES = ("state_reads", "state_writes", "state_ends")
"""The fields of a batch that only a model with recurrent layers has."""
INPUTS = tuple(name for name in BatchShape(1, 1, 1, 0, 1).fields if name not in (ADAPTERS, *STATES, *WINDOW_FIELDS))
"""The fields of a batch that every graph has as inputs, in order."""
STREAM = "stream"
"""An additional input of the graphs of later pipeline stages: the output [T, E] of the previous stage."""


def graph_inputs(model: CausalLM, is_adapted: bool) -> tuple[str, ...]:
    """Return the fields of a batch that are inputs of the model's graph, in order.

    `is_adapted`: for the graph of steps with adapters.
    """
    states = STATES * model.config.capabilities.is_recurrent
    windows = tuple(WINDOW_FIELDS) * (model.longest_window is not None)
    return INPUTS + states + windows + (ADAPTERS,) * is_adapted


Argument = Callable[[list[Any], KVCache], Any]
"""Returns an argument of a call from the step's values and the cache."""


class DamagedGraphError(Exception):
    """The graph cannot be run. The message gives the reason."""


@dataclass(frozen=True)
class Call:
    """One node of the graph."""

    name: str
    function: Callable[..., Any]
    arguments: list[Argument]
    keywords: dict[str, Argument]
    outputs: list[int]
    """The indices of the step's values that the call sets."""
    has_one_output: bool
    equal_sizes: list[tuple[Argument, Argument]]
    """Pairs of sizes that must be equal, because C++ would otherwise read out of bounds."""

    def run(self, values: list[Any], cache: KVCache) -> None:
        for left, right in self.equal_sizes:
            if left(values, cache) != right(values, cache):
                raise ValueError(f"{left(values, cache)} rows or choices, expected {right(values, cache)}")
        keywords = {name: argument(values, cache) for name, argument in self.keywords.items()}
        result = self.function(*[argument(values, cache) for argument in self.arguments], **keywords)
        results = (result,) if self.has_one_output else result or ()
        for number, value in zip(self.outputs, results, strict=False):
            values[number] = value


@dataclass(frozen=True)
class Graph:
    """The calls of a step. `body` computes the hidden states, `head` computes their logits.

    `head` is empty in a stage without the head.
    """

    fields: tuple[str, ...]
    """The first values of a step: fields of the batch, and the stream."""
    body: list[Call]
    head: list[Call]
    num_values: int
    hidden: int
    logits: int
    num_quantized: int = 0
    """The number of products whose float inputs are quantised before the product."""

    def compute_hidden(self, batch: Batch, cache: KVCache, stream: Tensor | None = None) -> Tensor:
        """Return hidden states [R, E] of the output rows, or the stream [T, E] of a stage that is not the last.

        `stream` [T, E]: the output of the previous stage. Raises DamagedGraphError if a node cannot be computed.
        """
        values = self._inputs(batch, stream)
        values += [None] * (self.num_values - len(values))
        return _run(self.body, values, cache, self.hidden)

    def compute_logits(self, hidden: Tensor, batch: Batch | None = None) -> Tensor:
        """Return logits [R, V] of hidden states [R, E], the output rows of `batch`. None: the rows belong to no batch.

        Raises DamagedGraphError as `compute_hidden` does.
        """
        values = [] if batch is None else self._inputs(batch, None)
        values += [None] * (self.num_values - len(values))
        values[self.hidden] = hidden
        return _run(self.head, values, KVCache([], 0, 0, hidden.dtype), self.logits)

    def _inputs(self, batch: Batch, stream: Tensor | None) -> list[Any]:
        """Return the values of `fields`. If all layers have the same blocks, these replace the blocks of windows."""
        replaced = {} if batch.shape.num_windowed else WINDOW_FIELDS
        return [stream if name == STREAM else getattr(batch, replaced.get(name, name)) for name in self.fields]


def _run(calls: list[Call], values: list[Any], cache: KVCache, result: int) -> Tensor:
    name = "the output"
    try:
        for call in calls:
            name = call.name
            call.run(values, cache)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise DamagedGraphError(f"{name} cannot be computed: {type(error).__name__}: {reason}") from error
    output = values[result]
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise DamagedGraphError("its outputs are not matrices")
    return output

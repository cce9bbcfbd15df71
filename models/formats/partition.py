"""How a checkpoint's tensors are divided among ranks: along one axis for tensor parallelism, by layers for pipeline parallelism.

The axes are Megatron's (arXiv 1909.08053): linear layers are cut along their outputs, those that write into the residual stream along
their inputs, embeddings and heads along the vocabulary; all else is whole on every rank. A fused matrix (queries, keys and values; gate
and up) is cut evenly like any other: who reads it joins it again before using it.
"""

import itertools
import logging
from dataclasses import dataclass

from torch import nn

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.formats.base import ExpectedTensor

log = logging.getLogger(__name__)

LISTED = 4  # tensors that the warning names


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a model."""

    stage: int
    """Of the pipeline."""
    axis: int | None
    """Along which the stage's ranks divide it; None: every rank has all of it."""


def partition(model: CausalLM, parameters: dict[str, str | None], tp: int, pp: int) -> dict[str, Place]:
    """The place of every tensor, for pp stages of tp ranks each.

    `parameters`: which of the model's a tensor is, by name; None: none of them, and then it is whole. A tensor whose axis tp does not
    divide is whole too, and named in a warning. Raises UserError for more stages than layers and for a tp that divides nothing.
    """
    num_layers = model.config.num_hidden_layers
    if pp > num_layers:
        raise UserError(f"pp={pp} is more than the model's {num_layers} layers: give at most {num_layers}")
    stages = _Stages(model, pp)
    places, undivided = {}, []
    for name, parameter in parameters.items():
        axis = None if parameter is None or tp == 1 else split_axis(model, parameter)
        if axis is not None and parameter is not None and model.get_parameter(parameter).shape[axis] % tp:
            axis = None
            undivided.append(name)
        places[name] = Place(stages.of(parameter or name), axis)
    if tp > 1 and all(place.axis is None for place in places.values()):
        raise UserError(f"tp={tp} divides no tensor of this model: give a divisor of its sizes")
    if undivided:
        more = f" and {len(undivided) - LISTED} more" if len(undivided) > LISTED else ""
        log.warning("tp=%d does not divide what is stored whole: %s%s", tp, ", ".join(undivided[:LISTED]), more)
    return places


def expected_tensors(model: CausalLM) -> dict[str, ExpectedTensor]:
    """Return what `model` expects of a checkpoint, whole or cut by tensor parallelism.

    Other engines cut embeddings along either axis, and a fused matrix straight through or section by section. Its slices do not tell
    which, so that it must be whole.
    """
    expected = {}
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        axis, sections = split_axis(model, name), model.layout.units.get(path.rpartition(".")[2], ())
        cuts: tuple[int, ...] = () if axis is None or len(sections) > 1 else (axis,)
        if cuts and isinstance(model.get_submodule(path), nn.Embedding):
            cuts = 0, 1
        expected[name] = ExpectedTensor(tuple(parameter.shape), cuts)
    return expected


def split_axis(model: CausalLM, parameter: str) -> int | None:
    """Return the axis along which tensor parallelism divides a parameter; None: every rank has it whole."""
    path, _, leaf = parameter.rpartition(".")
    module, layer, layout = model.get_submodule(path), path.rpartition(".")[2], model.layout
    output_axis: int | None = 0 if isinstance(module, nn.Embedding) else getattr(module, "output_axis", None)
    if output_axis is None or layer in layout.replicated:
        return None
    if layer in layout.row_parallel:  # whose bias is added once, to the sum
        return 1 - output_axis if leaf == "weight" else None
    return output_axis if leaf == "weight" else 0


class _Stages:
    """Consecutive layers, sizes that differ by at most one; the embedding with the first, the final norm and the head with the last."""

    def __init__(self, model: CausalLM, pp: int) -> None:
        num_layers = model.config.num_hidden_layers
        self._prefix, self._last = f"{model.layout.layers}.", pp - 1
        self._layers = {str(layer): layer * pp // num_layers for layer in range(num_layers)}
        names = (name for name, _ in model.named_parameters())
        self._before = set(itertools.takewhile(lambda name: not name.startswith(self._prefix), names))

    def of(self, name: str) -> int:
        if name.startswith(self._prefix):
            return self._layers.get(name.removeprefix(self._prefix).partition(".")[0], self._last)
        return 0 if name in self._before else self._last

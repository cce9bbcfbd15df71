"""How checkpoint files store quantised weights: which layers, and the names, shapes and packing of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from models.linear_layers import LinearSpec
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight


@dataclass(frozen=True)
class StoredWeight:
    weight: QuantizedWeight
    input_scale: Tensor | None = None
    """Static scale of the activations, a float32 scalar. None for float activations and for a scale per token."""


class OutputAxis(NamedTuple):
    """The axis of a tensor that holds the output channels of its weight."""

    axis: int
    per_index: int = 1
    """Output channels per index: 8 for 4-bit codes in an int32 word, or the rows of a block with one scale."""


class WeightLayout(Protocol):
    """How a file stores one weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]"""

    def output_axes(self) -> dict[str, OutputAxis]:
        """Return the output axis of each tensor that has one, by tensor name.

        Empty if the codes of an output depend on all outputs (a scale per tensor). The weight is then read whole.
        """

    def of_outputs(self, num_outputs: int) -> "WeightLayout":
        """Return the layout of `num_outputs` consecutive outputs. The first one is a multiple of every `per_index`."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names, relative to the layer, and the shapes of the weight's tensors. The bias is not included."""

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight that these tensors hold. Raises UserError for impossible values."""


class WritableLayout(WeightLayout, Protocol):
    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors that hold the weight, by their names relative to the layer."""


class StoredQuantization(Protocol):
    """The `quantization_config` of a checkpoint: which layers are quantised, and how files store them."""

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        """Return the layer's scheme, or None for a layer that is stored in floats.

        tensor_shapes: shapes of the file's tensors of this layer, by their names relative to the layer.
        """

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        """Return the layout of a layer that has a scheme."""


def may_be_permuted(layout: WeightLayout) -> bool:
    """Whether the file stores the group of each input channel, or their order."""
    return any(name.endswith(("g_idx", "permutation")) for name in layout.tensors())


def holds_codes(tensor_shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the file has more tensors for a layer than a float layer needs.

    Used for formats whose tools do not list the float layers, or match the patterns of the list in different ways.
    """
    return bool(tensor_shapes.keys() - {"weight", "bias"})

"""How a checkpoint's files hold quantised weights: which layers, and the names, shapes and packing of their tensors."""

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
    """Static scale of the activations, a float32 scalar. None where each token has its own scale, or activations are floats."""


class OutputAxis(NamedTuple):
    """Tells along which axis of a tensor the outputs of its weight lie."""

    axis: int
    per_index: int = 1
    """How many outputs share an index: those in a word, or in a block with one scale."""


class WeightLayout(Protocol):
    """How a file holds one weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """[O, I]"""

    def output_axes(self) -> dict[str, OutputAxis]:
        """Return where the outputs lie in the tensors that have an axis of them.

        Empty if each output depends on all: then the weight is read whole.
        """

    def of_outputs(self, num_outputs: int) -> "WeightLayout":
        """Return the layout of so many neighbouring outputs, from a multiple of every `per_index` on."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names, within the layer, and shapes of the tensors that hold the weight; not of the bias."""

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight that these tensors hold. Raises UserError for impossible values."""


class WritableLayout(WeightLayout, Protocol):
    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors that hold the weight, by their names within the layer."""


class StoredQuantization(Protocol):
    """The `quantization_config` of a checkpoint: which layers are quantised, and how files hold them."""

    def scheme(self, layer: LinearSpec, found: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        """Return the layer's scheme, or None for one stored in floats. found: shapes of the tensors in the file under the layer's name."""

    def layout(self, layer: LinearSpec, found: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        """Return the layout of a layer that has a scheme."""


def may_be_permuted(layout: WeightLayout) -> bool:
    """Return whether a file says of which group each input is."""
    return any(name.endswith("g_idx") for name in layout.tensors())


def holds_codes(found: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the file has more tensors for a layer than a float layer needs.

    For formats whose tools do not list the layers that they left out, or list them in patterns that each tool matches differently.
    """
    return bool(found.keys() - {"weight", "bias"})

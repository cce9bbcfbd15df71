"""How a checkpoint's files hold quantised weights: which layers, and the names, shapes and packing of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from models.layers.linear import Layer
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight


@dataclass(frozen=True)
class StoredWeight:
    weight: QuantizedWeight
    input_scale: Tensor | None = None
    """float32 scalar: an activation's code times this is its value. None where each token has its own, or there are no codes."""


class WeightLayout(Protocol):
    """One weight in a file."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Own names and shapes of the tensors that hold it, without the layer's bias."""

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Raises UserError for values that cannot be."""


class WritableLayout(WeightLayout, Protocol):
    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        """The tensors, by their own names."""


class StoredQuantization(Protocol):
    """What the `quantization_config` of a checkpoint says."""

    def scheme(self, layer: Layer, found: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        """None for a layer that is stored in floats. `found` are the shapes of the tensors that the file has under the layer's name."""

    def layout(self, layer: Layer, found: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        """For a layer that has a scheme."""


def holds_codes(found: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a layer's tensors in the file are more than those of a float layer.

    For formats whose tools do not say which layers they left out, or say it in patterns that each tool matches in its own way.
    """
    return bool(found.keys() - {"weight", "bias"})

"""Q8_0 and Q4_0 weights of a GGUF file, which stay as they are. It has no `quantization_config`: a tensor's own type says it.

O output channels, I input channels, G = I / 32 groups of input channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from conf.errors import UserError
from models.formats.base import CODE_GROUP, CodedWeights, WeightFile
from models.layers.linear import Layer
from quantization.layouts.base import StoredWeight
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat


@dataclass(frozen=True)
class GGUFQuantization:
    """The modules whose weights hold codes, and the bits of these."""

    bits: dict[str, int]

    def scheme(self, layer: Layer, found: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        bits = self.bits.get(layer.name)
        return None if bits is None else LinearScheme(WeightFormat(bits, group_size=CODE_GROUP))

    def layout(self, layer: Layer, found: Mapping[str, tuple[int, ...]]) -> "GGUFWeight":
        return GGUFWeight(layer.shape)


def read_gguf_quantization(files: list[WeightFile]) -> GGUFQuantization | None:
    """None where the files are of another format, or hold no such weights."""
    bits = {
        module: bits
        for file in files
        if isinstance(file, CodedWeights)
        for module, bits in file.coded_modules().items()
    }
    return GGUFQuantization(bits) if bits else None


@dataclass(frozen=True)
class GGUFWeight:
    """codes int8 [O, I] and scales float16 [O, G], as CodedWeights gives them."""

    shape: tuple[int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        return {"codes": self.shape, "scales": (outputs, inputs // CODE_GROUP)}

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Raises UserError for scales that are not finite. They may be 0, of groups of zeros, and those of Q4_0 negative."""
        scales = tensors["scales"].float()
        if not scales.isfinite().all():
            raise UserError("its scales have values that are not finite: the file is damaged")
        return StoredWeight(QuantizedWeight(tensors["codes"], scales))

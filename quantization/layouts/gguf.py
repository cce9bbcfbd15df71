"""Q8_0 and Q4_0 weights of a GGUF file, which keep their codes. A tensor's own type takes the place of a `quantization_config`.

O output channels, I input channels, G = I / 32 groups of input channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from conf.errors import UserError
from models.formats.base import CODE_GROUP, CodedWeights, WeightFile
from models.linear_layers import LinearSpec
from quantization.layouts.base import OutputAxis, StoredWeight
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat


@dataclass(frozen=True)
class GGUFQuantization:
    """The modules whose weights are codes, with the bits of each."""

    bits: dict[str, int]

    def scheme(self, layer: LinearSpec, found: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        bits = self.bits.get(layer.name)
        return None if bits is None else LinearScheme(WeightFormat(bits, group_size=CODE_GROUP))

    def layout(self, layer: LinearSpec, found: Mapping[str, tuple[int, ...]]) -> "GGUFWeight":
        return GGUFWeight(layer.shape)


def read_gguf_quantization(files: list[WeightFile]) -> GGUFQuantization | None:
    """Return the quantised modules of GGUF files; None for another format, and for files without such weights."""
    bits = {
        module: bits
        for file in files
        if isinstance(file, CodedWeights)
        for module, bits in file.coded_modules().items()
    }
    return GGUFQuantization(bits) if bits else None


@dataclass(frozen=True)
class GGUFWeight:
    """One weight: codes int8 [O, I] and scales float16 [O, G], as CodedWeights gives them."""

    shape: tuple[int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        return {"codes": self.shape, "scales": (outputs, inputs // CODE_GROUP)}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {"codes": OutputAxis(0), "scales": OutputAxis(0)}

    def of_outputs(self, num_outputs: int) -> "GGUFWeight":
        return GGUFWeight((num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. Raises UserError for scales that are not finite; groups of zeros have 0, and Q4_0 has negative ones."""
        scales = tensors["scales"].float()
        if not scales.isfinite().all():
            raise UserError("its scales have values that are not finite: the file is damaged")
        return StoredWeight(QuantizedWeight(tensors["codes"], scales))

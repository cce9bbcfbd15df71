"""GGUF weights that keep their codes.

The type of a tensor selects its format, because GGUF has no `quantization_config`.

O output channels, I input channels, G = I / 32 groups of input channels.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.linear.block_weight import KINDS, read_factors
from models.formats.base import CODE_GROUP, CodedWeights, WeightFile
from models.linear_layers import LinearSpec
from quantization.layouts.base import OutputAxis, StoredWeight, WeightLayout
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat, of_blocks

CPU = torch.device("cpu")
log = logging.getLogger(__name__)

NOT_FINITE = "its scales have values that are not finite: the file is damaged"
FORMATS = {f"Q{bits}_0": WeightFormat(bits, group_size=CODE_GROUP) for bits in (8, 4)} | {
    name: of_blocks(name) for name in KINDS
}
"""Formats of the ggml types that stay packed on a CPU.

All other types become floats. On a GPU the KINDS become floats too.
"""


@dataclass(frozen=True)
class GGUFQuantization:
    """The modules whose weights stay packed, with the names of their ggml types."""

    types: dict[str, str]

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        kind = self.types.get(layer.name)
        return None if kind is None else LinearScheme(FORMATS[kind])

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        kind = self.types[layer.name]
        return GGUFBlocks(kind, layer.shape) if kind in KINDS else GGUFWeight(layer.shape)


def read_gguf_quantization(files: list[WeightFile], device: torch.device = CPU) -> GGUFQuantization | None:
    """Return the modules of GGUF files that stay packed on `device`.

    None for another file format, and for files without packed weights.
    """
    packed = {
        module: kind
        for module, kind in _types(files).items()
        if kind in FORMATS and (device.type == "cpu" or kind not in KINDS)
    }
    return GGUFQuantization(packed) if packed else None


def warn_of_unpacked(files: list[WeightFile], stored: GGUFQuantization | None) -> None:
    """Log in one line which weight types are unpacked to floats."""
    packed = {} if stored is None else stored.types
    if unpacked := Counter(kind for module, kind in _types(files).items() if module not in packed):
        counts = ", ".join(f"{count} of {kind}" for kind, count in sorted(unpacked.items()))
        log.warning("weights are unpacked to floats, which take more memory: %s", counts)


def _types(files: list[WeightFile]) -> dict[str, str]:
    coded = [file.coded_modules() for file in files if isinstance(file, CodedWeights)]
    return {module: kind for modules in coded for module, kind in modules.items()}


@dataclass(frozen=True)
class GGUFWeight:
    """One weight: codes int8 [O, I] and scales float16 [O, G], as CodedWeights returns them."""

    shape: tuple[int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        return {"codes": self.shape, "scales": (outputs, inputs // CODE_GROUP)}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {"codes": OutputAxis(0), "scales": OutputAxis(0)}

    def of_outputs(self, num_outputs: int) -> "GGUFWeight":
        return GGUFWeight((num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight.

        Raises UserError for scales that are not finite. A group of zeros has scale 0, and Q4_0 has negative scales.
        """
        scales = tensors["scales"].float()
        if not scales.isfinite().all():
            raise UserError(NOT_FINITE)
        return StoredWeight(QuantizedWeight(tensors["codes"], scales))


@dataclass(frozen=True)
class GGUFBlocks:
    """One weight in blocks of a ggml type of KINDS: blocks uint8 [O, bytes], as CodedWeights returns them."""

    kind: str
    shape: tuple[int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        return {"blocks": (outputs, inputs // KINDS[self.kind].block_size * KINDS[self.kind].block_bytes)}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {"blocks": OutputAxis(0)}

    def of_outputs(self, num_outputs: int) -> "GGUFBlocks":
        return GGUFBlocks(self.kind, (num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. Raises UserError for block factors (scales, minimums) that are not finite."""
        blocks = tensors["blocks"]
        if not read_factors(self.kind, blocks).isfinite().all():
            raise UserError(NOT_FINITE)
        return StoredWeight(QuantizedWeight(blocks, torch.empty(len(blocks), 0), blocks=self.kind))

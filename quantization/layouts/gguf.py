"""GGUF weights that keep their codes.

The type of a tensor selects its format, because GGUF has no `quantization_config`.

O output channels, I input channels.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.linear.block_weight import KINDS, UNIT, has_finite_factors, read_blocks
from models.formats.base import CodedWeights, WeightFile
from models.linear_layers import LinearSpec
from quantization.layouts.base import OutputAxis, StoredWeight, WeightLayout
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat, of_blocks

CPU = torch.device("cpu")
log = logging.getLogger(__name__)

NOT_FINITE = "its scales have values that are not finite, or negative ones of NVFP4: the file is damaged"
FORMATS = {name: of_blocks(name) for name in KINDS}
"""Formats of the ggml types that stay packed on a CPU. All other types become floats."""
GPU_FORMATS = {
    **{f"Q{bits}_0": WeightFormat(bits, group_size=UNIT) for bits in (8, 4)},
    **{name: FORMATS[name] for name in ("MXFP4", "NVFP4")},
}
"""Formats of the ggml types that stay packed on a GPU."""


@dataclass(frozen=True)
class GGUFQuantization:
    """The modules whose weights stay packed, with the names of their ggml types and the formats of the types."""

    types: dict[str, str]
    formats: Mapping[str, WeightFormat]
    permuted: set[str] = field(default_factory=set)
    """The modules whose input channels have the file's order."""

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        kind = self.types.get(layer.name)
        return None if kind is None else LinearScheme(self.formats[kind])

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        kind = self.types[layer.name]
        return GGUFWeight(kind, layer.shape, self.formats[kind].kind.is_blocks, layer.name in self.permuted)


def read_gguf_quantization(files: list[WeightFile], device: torch.device = CPU) -> GGUFQuantization | None:
    """Return the modules of GGUF files that stay packed on `device`.

    None for another file format, and for files without packed weights.
    """
    formats = FORMATS if device.type == "cpu" else GPU_FORMATS
    packed = {module: kind for module, kind in _types(files).items() if kind in formats}
    permuted = {module for file in files if isinstance(file, CodedWeights) for module in file.permuted_modules()}
    return GGUFQuantization(packed, formats, permuted) if packed else None


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
    """One weight in blocks of a ggml type of KINDS: blocks uint8 [O, bytes], as CodedWeights returns them, for NVFP4
    global_scale float32 [1], and with `is_permuted` permutation int64 [I].

    With `keeps_blocks` the model holds the blocks, else their codes and scales.
    """

    kind: str
    shape: tuple[int, int]
    keeps_blocks: bool = True
    is_permuted: bool = False

    def tensors(self) -> dict[str, tuple[int, ...]]:
        outputs, inputs = self.shape
        kind = KINDS[self.kind]
        shapes: dict[str, tuple[int, ...]] = {"blocks": (outputs, inputs // kind.block_size * kind.block_bytes)}
        shapes |= {"global_scale": (1,)} if kind.has_global_scale else {}
        return shapes | ({"permutation": (inputs,)} if self.is_permuted else {})

    def output_axes(self) -> dict[str, OutputAxis]:
        return {"blocks": OutputAxis(0)}

    def of_outputs(self, num_outputs: int) -> "GGUFWeight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. Raises UserError for block factors (scales, minimums) that are not finite."""
        blocks, has_global_scale = tensors["blocks"], KINDS[self.kind].has_global_scale
        scales = tensors["global_scale"].double()[None] if has_global_scale else torch.empty(len(blocks), 0)
        if not has_finite_factors(self.kind, blocks) or not (scales.isfinite() & (scales > 0)).all():
            raise UserError(NOT_FINITE)
        permutation = tensors.get("permutation")
        if self.keeps_blocks:
            return StoredWeight(QuantizedWeight(blocks, scales, permutation=permutation, blocks=self.kind))
        unpacked, offset = read_blocks(self.kind, blocks), 2 ** (KINDS[self.kind].bits - 1)
        codes = (unpacked.codes - offset).view(torch.int8)
        return StoredWeight(QuantizedWeight(codes, unpacked.factors[0], permutation=permutation))

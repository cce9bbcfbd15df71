"""Read BitNet b1.58's ternary weights: codes -1, 0 and 1, a scale per tensor, and int8 activations with a scale per token.

O output channels, I input channels. Sources: arXiv 2402.17764; transformers 5, integrations/bitnet.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.layouts.base import OutputAxis, StoredWeight, WeightLayout, holds_codes
from quantization.layouts.checks import of_type, positive, scalar_shape
from quantization.layouts.patterns import compile_pattern
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat

METHOD = "bitnet"
SCALE = "weight_scale"
PER_BYTE = 4  # codes
SMALLEST_SCALE = 1e-5
HEAD = "lm_head"  # stays floats
SCHEME = LinearScheme(WeightFormat(4), Activations.dynamic)


@dataclass(frozen=True)
class BitNet:
    """The `quantization_config` of a BitNet checkpoint."""

    is_online: bool
    """Whether the files have float weights, which are rounded when they are loaded."""
    divides: bool
    """Whether `weight_scale` divides the codes (`bitlinear`), or multiplies them (`autobitlinear`)."""
    floats: tuple[str, ...]
    """Patterns of the names of float layers, in online files."""

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        is_quantized = not self._is_float(layer.name) if self.is_online else holds_codes(tensor_shapes)
        return SCHEME if is_quantized else None

    def _is_float(self, name: str) -> bool:
        patterns = (
            compile_pattern(rf"(?:{key})(?:(?<=\.)|(?=\.|$))") for key in self.floats
        )  # up to a module boundary
        return name.endswith(self.floats) or any(pattern.match(name) for pattern in patterns)

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> WeightLayout:
        if self.is_online:
            return OnlineWeight(layer.shape)
        return TernaryWeight(layer.shape, self.divides, tensor_shapes)


def read_bitnet(config: ConfigReader) -> BitNet:
    """Read the `quantization_config`. Raises UserError for a norm before each layer, and for other layers and modes."""
    config.expect("use_rms_norm", (False, None), False)
    for key in ("quant_method", "rms_norm_eps"):
        config.raw(key)
    linear_class = config.expect("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = config.expect("quantization_mode", ("offline", "online"), "offline")
    floats = config.raw("modules_to_not_convert") or [HEAD]
    if not isinstance(floats, list) or not all(isinstance(name, str) for name in floats):
        raise UserError(f"quantization_config: modules_to_not_convert={floats!r} is not a list of names")
    is_online = linear_class == "autobitlinear" and mode == "online"
    return BitNet(is_online, linear_class == "bitlinear", tuple(floats))


@dataclass(frozen=True)
class TernaryWeight:
    """Codes uint8 [ceil(O / 4), I], and a scale. Bits 2k and 2k + 1 of row r hold 1 plus the code of row r + k * ceil(O / 4)."""

    shape: tuple[int, int]
    divides: bool
    tensor_shapes: Mapping[str, tuple[int, ...]]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        packed = -(-self.shape[0] // PER_BYTE), self.shape[1]
        return {"weight": packed, SCALE: scalar_shape(self.tensor_shapes, SCALE)}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {}  # neighbours of a byte are far apart, so the weight is read whole

    def of_outputs(self, num_outputs: int) -> "TernaryWeight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. Raises UserError for a wrong dtype, a code of 2, and a scale that is not positive."""
        packed, scale = of_type(tensors, "weight", torch.uint8), positive(tensors[SCALE], SCALE)
        parts = [(packed >> 2 * k & 3).view(torch.int8) - 1 for k in range(PER_BYTE)]
        codes = torch.cat(parts)[: self.shape[0]]
        if codes.numel() and codes.max() > 1:
            raise UserError("weight has codes that are not -1, 0 or 1: the file is damaged, download it again")
        return StoredWeight(_weight(codes, 1 / scale if self.divides else scale))


@dataclass(frozen=True)
class OnlineWeight:
    """A float weight [O, I], whose scale is the mean of its magnitudes."""

    shape: tuple[int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape}

    def output_axes(self) -> dict[str, OutputAxis]:
        return {}

    def of_outputs(self, num_outputs: int) -> "OnlineWeight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the rounded weight. Raises UserError for a weight that is not floats or not finite."""
        weight = tensors["weight"]
        if not weight.is_floating_point():
            raise UserError(f"weight is {weight.dtype}, expected floats to quantise")
        scale = 1 / positive(weight.float().abs().mean().clamp(min=SMALLEST_SCALE), "the mean of weight")
        codes = (weight.float() * scale).round().clamp(-1, 1).to(torch.int8)
        return StoredWeight(_weight(codes, (1 / scale).to(weight.dtype).float()))


def _weight(codes: Tensor, scale: Tensor) -> QuantizedWeight:
    return QuantizedWeight(codes, scale.expand(len(codes), 1).contiguous())

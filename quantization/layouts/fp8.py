"""Read the fp8 (e4m3) layout of DeepSeek, Qwen and vLLM, with a scale per block of a weight or per tensor.

O output channels, I input channels, B rows and C columns per block. Source: DeepSeek-V3, inference/kernel.py;
transformers 5, integrations/finegrained_fp8.py; vLLM, quantization/fp8.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.codes import CodeKind
from quantization.layouts.base import OutputAxis, StoredWeight, holds_codes
from quantization.layouts.checks import finite, of_type, positive, scalar_shape
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat

METHOD = "fp8"
# Keys that are read and ignored. The tensors show which layers are floats; the other keys are about training and
# loading.
NO_EFFECT = ("quant_method", "modules_to_not_convert", "ignored_layers", "modules_to_convert", "dequantize")


@dataclass(frozen=True)
class Fp8:
    """The `quantization_config` of an fp8 checkpoint. `block` is (B, C), or None for a scale per tensor."""

    block: tuple[int, int] | None
    activations: Activations

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        size = self.block[1] if self.block else None
        format = WeightFormat(8, CodeKind.FP8, group_size=size, per_tensor=size is None)
        return LinearScheme(format, self.activations) if holds_codes(tensor_shapes) else None

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> "Fp8Weight":
        return Fp8Weight(layer.shape, self.block, self.activations is Activations.static, tensor_shapes)


def read_fp8(config: ConfigReader) -> Fp8:
    """Read the `quantization_config`.

    Raises UserError for other number formats, and for static activations with blocks.
    """
    config.expect("fmt", (None, "e4m3", "float8_e4m3fn"), None)
    config.expect("scale_fmt", (None, "float"), None)
    config.expect("expert_dtype", (None, "fp8"), None)
    for key in ("kv_cache_scheme", "kv_cache_quant_method"):
        config.expect(key, (None,), None)
    for key in NO_EFFECT:
        config.raw(key)
    activations = Activations[config.expect("activation_scheme", ("dynamic", "static"), "dynamic")]
    if config.raw("weight_block_size") is None:
        return Fp8(None, activations)
    config.expect("activation_scheme", ("dynamic",), "dynamic")
    return Fp8(read_block(config, "weight_block_size"), activations)


def read_block(config: ConfigReader, key: str) -> tuple[int, int]:
    """Return (B, C). Raises UserError for another value."""
    block = config.raw(key)
    if not isinstance(block, list) or [type(size) for size in block] != [int, int] or min(block) < 1:
        raise UserError(f"quantization_config: {key}={block!r} is not a list of two numbers above 0")
    return block[0], block[1]


@dataclass(frozen=True)
class Fp8Weight:
    """One weight: codes float8_e4m3fn [O, I], and scales [ceil(O / B), ceil(I / C)] or a scalar.

    With static activations there is also their scale, a scalar. Tools name the scales `weight_scale_inv` or
    `weight_scale`, and `input_scale` or `activation_scale`. A weight is always code * scale.
    """

    shape: tuple[int, int]
    block: tuple[int, int] | None
    is_static: bool
    tensor_shapes: Mapping[str, tuple[int, ...]]

    @property
    def _scale_name(self) -> str:
        return "weight_scale" if "weight_scale" in self.tensor_shapes else "weight_scale_inv"

    @property
    def _input_name(self) -> str:
        return "activation_scale" if "activation_scale" in self.tensor_shapes else "input_scale"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        scales = scalar_shape(self.tensor_shapes, self._scale_name)
        if self.block:
            scales = (-(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1]))
        names: dict[str, tuple[int, ...]] = {"weight": self.shape, self._scale_name: scales}
        if self.is_static:
            names[self._input_name] = scalar_shape(self.tensor_shapes, self._input_name)
        return names

    def output_axes(self) -> dict[str, OutputAxis]:
        blocks = {self._scale_name: OutputAxis(0, self.block[0])} if self.block else {}
        return {"weight": OutputAxis(0)} | blocks

    def of_outputs(self, num_outputs: int) -> "Fp8Weight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight. The scale of a block is repeated for each of its rows.

        Raises UserError for a wrong dtype, for weight scales that are not finite, and for activation scales that are
        not positive.
        """
        codes = of_type(tensors, "weight", torch.float8_e4m3fn)
        scales = finite(tensors[self._scale_name], self._scale_name)
        if self.block:
            rows, columns = min(self.block[0], self.shape[0]), min(self.block[1], self.shape[1])
            # All groups of a row must have one size, also if the row ends within a block.
            width = math.gcd(columns, self.shape[1])
            scales = scales.repeat_interleave(rows, 0)[: self.shape[0]]
            scales = scales.repeat_interleave(columns // width, 1)[:, : self.shape[1] // width]
        else:
            scales = scales.reshape(1, 1)
        static = positive(tensors[self._input_name], self._input_name).reshape(()) if self.is_static else None
        return StoredWeight(QuantizedWeight(codes, scales), static)

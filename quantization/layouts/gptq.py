"""Read and write the GPTQ layout of AutoGPTQ (v1) and GPTQModel (v1 and v2).

O output channels, I input channels, G groups of input channels. Source: GPTQModel 2,
gptqmodel/nn_modules/qlinear/torch.py, quantization/config.py, utils/model.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.codes import CodeKind
from quantization.layouts.base import OutputAxis, StoredWeight, holds_codes
from quantization.layouts.checks import as_float16, channel_order, check_autoround, divided, finite, of_type
from quantization.layouts.packing import WORD, num_words, pack, unpack
from quantization.layouts.patterns import compile_pattern
from quantization.scheme import LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat

METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
ONES = {4: 0x11111111, 8: 0x01010101}  # a word of codes that are all 1
# Keys that are read and ignored. The tensors show which layers are floats; the other keys are about calibration and
# kernels.
NO_EFFECT = """
    quant_method damp_percent damp_auto_increment static_groups true_sequential mse act_group_aware model_name_or_path
    model_file_base_name meta lm_head modules_in_block_to_quantize block_name_to_quantize module_name_preceding_first_block
    batch_size cache_block_outputs dataset exllama_config max_input_length model_seqlen pad_token_id tokenizer
    use_cuda_fp16 use_exllama disable_exllama version backend method quantizer
""".split()


@dataclass(frozen=True)
class Gptq:
    """The `quantization_config` of a GPTQ checkpoint.

    `rules` are regular expressions for the start of layer names, each with its format. None leaves a layer in floats.
    """

    format: WeightFormat
    rules: tuple[tuple[re.Pattern[str], WeightFormat | None], ...]
    is_v1: bool
    act_order: bool

    def scheme(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> LinearScheme | None:
        format = self._format(layer.name)
        return LinearScheme(format) if format and holds_codes(tensor_shapes) else None

    def layout(self, layer: LinearSpec, tensor_shapes: Mapping[str, tuple[int, ...]]) -> "GptqWeight":
        format = self._format(layer.name)
        assert format is not None
        has_unused_bias = "bias" in tensor_shapes and not layer.has_bias
        return GptqWeight(layer.shape, format, self.is_v1, self.act_order or "g_idx" in tensor_shapes, has_unused_bias)

    def _format(self, name: str) -> WeightFormat | None:
        return next((format for pattern, format in self.rules if pattern.match(name)), self.format)


def read_gptq(config: ConfigReader) -> Gptq:
    """Read the `quantization_config`.

    Raises UserError for other bit widths, for layouts of other kernels, and for rules that change more than bits, group
    size and symmetry.
    """
    key = "checkpoint_format" if config.raw("checkpoint_format") is not None else "format"
    version = config.expect(key, (V1, V2), V1)
    config.expect("format", (None, V1, V2), None)
    config.expect("is_marlin_format", (False, None), None)
    config.expect("pack_dtype", ("int32",), "int32")
    config.expect("rotation", (None, ""), None)
    config.expect("adapter", (None, {}), None)
    default = read_format(config, None)
    act_order = config.get("desc_act", bool, False)
    rules = config.section("dynamic")
    patterns = list(config.get("dynamic", dict, {}))
    for key in NO_EFFECT:
        config.raw(key)
    check_autoround(config)
    config.expect("extra_config", (None, {}), None)
    return Gptq(
        default, tuple(_read_rule(rules, text, default) for text in patterns if rules), version == V1, act_order
    )


def read_format(config: ConfigReader, default: WeightFormat | None) -> WeightFormat:
    """Read the format of a config, or of a rule. A rule inherits the values of `default` that it does not set."""
    bits = config.expect("bits", (4, 8), default.bits if default else None)
    symmetric = config.get("sym", bool, default.symmetric if default else True)
    if bits == 8 and not symmetric:
        raise UserError("quantization_config: sym=false with bits=8 is not supported: only with bits=4")
    whole_rows = config.raw("group_size", -1 if default and default.group_size is None else None) == -1
    group_size = None if whole_rows else config.count("group_size", default.group_size if default else None)
    return WeightFormat(bits, symmetric=symmetric, group_size=group_size)


def _read_rule(rules: ConfigReader, text: str, default: WeightFormat) -> tuple[re.Pattern[str], WeightFormat | None]:
    """Read a rule.

    `-:` leaves matching layers in floats (None); `+:` or no prefix changes them. The first match counts.
    """
    pattern = compile_pattern(text.removeprefix("+:").removeprefix("-:"))
    if text.startswith("-:"):
        return pattern, None
    rule = rules.section(text)
    if rule is None:
        return pattern, default
    format = read_format(rule, default)
    rule.raw("desc_act")  # ignored: the file stores the group of each channel
    if unread := rule.unread():
        raise UserError(f"quantization_config: dynamic: {text!r} has settings that are not known: {', '.join(unread)}")
    return pattern, format


def write_config(schemes: dict[str, LinearScheme], float_layers: list[str], act_order: bool) -> dict[str, Any]:
    """Return the `quantization_config` for `schemes`, which maps layer names to schemes.

    `float_layers` are the linear layers that stay floats. act_order: whether any weight has a permutation. Asymmetric weights
    need v2, because v1 cannot store a zero point of 0. Raises UserError for fp8 and for quantised activations: the
    layout has none of them.
    """
    for scheme in schemes.values():
        if scheme.weights.kind is not CodeKind.INT or scheme.activations is not Activations.none:
            raise UserError(f"GPTQ holds int4 and int8 weights, not {scheme}: give quantize.format=compressed_tensors")
    formats = [scheme.weights for scheme in schemes.values()]
    default = max(formats, key=formats.count)
    exceptions = {
        f"+:^{re.escape(name)}$": _write_format(s.weights) for name, s in schemes.items() if s.weights != default
    }
    return {
        "quant_method": METHOD,
        "checkpoint_format": V1 if all(format.symmetric for format in formats) else V2,
        **_write_format(default),
        "desc_act": act_order,
        "lm_head": "lm_head" in schemes,
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in float_layers} | exceptions,
    }


def _write_format(format: WeightFormat) -> dict[str, Any]:
    return {"bits": format.bits, "group_size": format.group_size or -1, "sym": format.symmetric}


@dataclass(frozen=True)
class GptqWeight:
    """One weight: qweight int32 [I * bits / 32, O], qzeros int32 [G, O * bits / 32], scales float16 [G, O].

    g_idx int32 [I], which some files lack, is the group of each input channel. All weights have zero points; symmetric
    codes have 8 (4 bits) or 128 (8 bits). v1 stores zero points minus 1. As in GPTQModel, 1 is added to the packed
    word, which restores a zero point of 0. AutoGPTQ's files have no zero point of 0.
    """

    shape: tuple[int, int]
    format: WeightFormat
    is_v1: bool
    has_group_index: bool = True
    has_unused_bias: bool = False
    """Whether the file has an all-zero bias for a layer without bias, as early AutoGPTQ wrote it."""

    def __post_init__(self) -> None:
        divided(self.shape, self.format.group_size)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        (outputs, inputs), bits = self.shape, self.format.bits
        groups = divided(self.shape, self.format.group_size)
        names: dict[str, tuple[int, ...]] = {
            "qweight": (num_words(inputs, bits), outputs),
            "qzeros": (groups, num_words(outputs, bits)),
            "scales": (groups, outputs),
        }
        names |= {"g_idx": (inputs,)} if self.has_group_index else {}
        return names | ({"bias": (outputs,)} if self.has_unused_bias else {})

    def output_axes(self) -> dict[str, OutputAxis]:
        axes = {"qweight": OutputAxis(1), "qzeros": OutputAxis(1, WORD // self.format.bits), "scales": OutputAxis(1)}
        return axes | ({"bias": OutputAxis(0)} if self.has_unused_bias else {})

    def of_outputs(self, num_outputs: int) -> "GptqWeight":
        return replace(self, shape=(num_outputs, self.shape[1]))

    def read(self, tensors: dict[str, Tensor]) -> StoredWeight:
        """Return the weight.

        Raises UserError for a wrong dtype, for scales that are not finite, and for impossible groups or zero points.
        """
        (outputs, inputs), bits = self.shape, self.format.bits
        scales = finite(tensors["scales"], "scales").T.contiguous()  # [O, G]
        codes = unpack(of_type(tensors, "qweight", torch.int32).T, bits, inputs)  # [O, I]
        words = of_type(tensors, "qzeros", torch.int32)
        zero_points = unpack(words + ONES[bits] if self.is_v1 else words, bits, outputs).T.contiguous()  # [O, G]
        if self.has_unused_bias and tensors["bias"].any():
            raise UserError("bias is not 0, but a layer of this model has none")
        order = None
        if self.has_group_index:
            group_index = of_type(tensors, "g_idx", torch.int32)
            order = channel_order(group_index, self.format.group_size, "g_idx")
        if order is not None:
            codes = codes[:, order]
        if not self.format.symmetric:
            return StoredWeight(QuantizedWeight(codes + 8, scales, zero_points + 8, order))
        if zero_points.any():
            raise UserError(f"qzeros has zero points other than {2 ** (bits - 1)}, but the config says sym=true")
        return StoredWeight(QuantizedWeight(codes, scales, None, order))

    def write(self, stored: StoredWeight) -> dict[str, Tensor]:
        """Return the tensors. Raises UserError for scales that float16 cannot hold."""
        weight, (_, inputs), bits = stored.weight, self.shape, self.format.bits
        codes, zero_points = weight.codes, torch.zeros_like(weight.scales, dtype=torch.int8)
        if weight.zero_points is not None:
            codes, zero_points = codes - 8, weight.zero_points - 8
        position = torch.arange(inputs)
        if weight.permutation is not None:
            position = weight.permutation.argsort()
            codes = codes[:, position]
        words = pack(zero_points.T, bits)
        return {
            "qweight": pack(codes, bits).T.contiguous(),
            "qzeros": words - ONES[bits] if self.is_v1 else words,
            "scales": as_float16(weight.scales).T.contiguous(),
            "g_idx": (position // (self.format.group_size or inputs)).int(),
        }

"""The compressed-tensors layout compared with the package of that name."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from torch import Tensor

from conf.errors import UserError
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.codes import CodeKind
from quantization.layouts import read_quantization
from quantization.layouts.base import StoredWeight, WritableLayout
from quantization.layouts.compressed_tensors import CompressedWeight, write_config
from quantization.layouts.fp4 import FP4Weight
from quantization.layouts.packing import pack, unpack
from quantization.scheme import LinearScheme
from quantization.weight_format import WeightFormat, of_blocks, quantize
from tests.helpers.cases import each
from tests.helpers.gptq import hessian_of, rounded_by_gptq

SCHEMES = {
    "int8": LinearScheme(WeightFormat(8)),
    "int8 groups": LinearScheme(WeightFormat(8, group_size=32)),
    "int4": LinearScheme(WeightFormat(4, group_size=16)),
    "int4 per channel": LinearScheme(WeightFormat(4)),
    "int4 asymmetric": LinearScheme(WeightFormat(4, symmetric=False, group_size=32)),
    "a8w8 dynamic": LinearScheme(WeightFormat(8), Activations.dynamic),
    "a8w8 static": LinearScheme(WeightFormat(8), Activations.static),
    "fp8": LinearScheme(WeightFormat(8, CodeKind.FP8), Activations.dynamic),
    "fp8 per tensor": LinearScheme(WeightFormat(8, CodeKind.FP8, per_tensor=True), Activations.static),
    "mxfp4": LinearScheme(of_blocks("MXFP4")),
    "nvfp4": LinearScheme(of_blocks("NVFP4")),
}
COMPRESSORS = {
    "mxfp4-pack-quantized": MXFP4PackedCompressor,
    "nvfp4-pack-quantized": NVFP4PackedCompressor,
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
}
SHAPE = (40, 128)
LAYER = LinearSpec("model.layers.0.mlp.up_proj", SHAPE, is_transposed=False, has_bias=False)


def stored(scheme: LinearScheme) -> StoredWeight:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    static = scheme.activations is Activations.static
    return StoredWeight(quantize(weight, scheme.weights), torch.tensor(0.25) if static else None)


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package give FP4 weights in float32 instead of bfloat16."""
    monkeypatch.setattr(nvfp4, "unpack_fp4_from_uint8", partial(unpack_fp4_from_uint8, dtype=torch.float32))


def layout(scheme: LinearScheme, shapes: dict[str, tuple[int, ...]] | None = None) -> WritableLayout:
    config = read_quantization(
        ConfigReader({"quantization_config": write_config({LAYER.name: scheme}, [], permuted=False)}, "config.json"),
        [],
    )
    assert config is not None
    assert config.scheme(LAYER, {}) == scheme
    made = config.layout(LAYER, shapes or {})
    assert isinstance(made, CompressedWeight | FP4Weight)
    return made


@each("bits", [4, 8])
@each("shape", [(1, 1), (3, 7), (5, 8), (2, 64), (4, 65)])
def test_packing_is_the_packages(bits: int, shape: tuple[int, int]) -> None:
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, dtype=torch.int8)
    words = pack(codes, bits)
    assert words.equal(pack_to_int32(codes, bits))
    assert unpack(words, bits, shape[1]).equal(codes)
    assert unpack(words, bits, shape[1]).equal(unpack_from_int32(words, bits, torch.Size(shape)))


@each("name", SCHEMES)
def test_the_package_reads_what_is_written(name: str) -> None:
    scheme = SCHEMES[name]
    weight = stored(scheme)
    tensors = layout(scheme).write(weight)
    config = write_config({LAYER.name: scheme}, ["lm_head"], permuted=False)
    parsed = QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    group = parsed.config_groups["group_0"]
    decompressed = COMPRESSORS[config["format"]].decompress(dict(tensors), group)["weight"]
    assert decompressed.equal(weight.weight.dequantize())  # the same products of the same two numbers
    assert parsed.ignore == ["lm_head"]


@each("name", [name for name in SCHEMES if name != "mxfp4"])  # its scales are powers of two
def test_scales_of_weights_may_have_any_sign_or_be_0(name: str) -> None:
    scheme = SCHEMES[name]
    tensors = layout(scheme).write(stored(scheme))
    scales = tensors["weight_scale"].float()
    scales[::3] *= -1
    scales.view(-1)[-1] = 0
    tensors["weight_scale"] = scales.to(tensors["weight_scale"].dtype)
    config = QuantizationConfig.model_validate(write_config({LAYER.name: scheme}, [], permuted=False))
    plain = COMPRESSORS[str(config.format)].decompress(dict(tensors), config.config_groups["group_0"])["weight"]
    assert layout(scheme, shapes(tensors)).read(tensors).weight.dequantize().equal(plain)


@each("name", SCHEMES)
def test_a_round_trip_keeps_every_code_and_scale(name: str) -> None:
    weight = stored(SCHEMES[name])
    tensors = layout(SCHEMES[name]).write(weight)
    reader = layout(SCHEMES[name], shapes(tensors))
    assert reader.tensors() == shapes(tensors)
    back = reader.read(tensors)
    assert back.weight.codes.view(torch.int8).equal(weight.weight.codes.view(torch.int8))
    assert back.weight.scales.equal(weight.weight.scales.expand_as(back.weight.scales))
    assert back.weight.dequantize().equal(weight.weight.dequantize())
    assert (back.input_scale is None) == (weight.input_scale is None)
    if weight.weight.zero_points is not None:  # the package also stores such codes unpacked
        signed = {"weight": weight.weight.codes - 8, "weight_zero_point": weight.weight.zero_points - 8}
        signed["weight_scale"] = tensors["weight_scale"]
        config = QuantizationConfig.model_validate(write_config({LAYER.name: SCHEMES[name]}, [], permuted=False))
        plain = IntQuantizationCompressor.decompress(dict(signed), config.config_groups["group_0"])["weight"]
        unpacked = CompressedWeight(SHAPE, SCHEMES[name], False, shapes(signed)).read(signed)
        assert unpacked.weight.dequantize().equal(plain)


def test_act_order_survives_a_round_trip() -> None:
    scheme = LinearScheme(WeightFormat(4, group_size=32))
    x = torch.randn(300, SHAPE[1], generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 3, SHAPE[1])
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    quantised = rounded_by_gptq(weight, hessian_of(x), scheme.weights, static_groups=False)
    assert quantised.permutation is not None
    tensors = layout(scheme).write(StoredWeight(quantised))
    back = layout(scheme, shapes(tensors)).read(tensors).weight
    assert back.dequantize().equal(quantised.dequantize())
    assert back.permutation is not None


@each(
    ("change", "message"),
    [
        ({"weight_scale": torch.full((40, 8), torch.inf)}, "weight_scale has values that are not finite"),
        ({"weight_scale": torch.full((40, 8), torch.nan)}, "weight_scale has values that are not finite"),
        ({"weight_packed": torch.zeros(40, 16)}, "weight_packed is torch.float32, expected torch.int32"),
        ({"weight_shape": torch.tensor([40, 127])}, r"weight_shape is \[40, 127\], expected \[40, 128\]"),
    ],
)
def test_impossible_values(change: dict[str, Tensor], message: str) -> None:
    scheme = SCHEMES["int4"]
    tensors = layout(scheme).write(stored(scheme)) | change
    with pytest.raises(UserError, match=message):
        layout(scheme, shapes(tensors)).read(tensors)


def test_groups_that_do_not_divide_a_layer() -> None:
    with pytest.raises(UserError, match=r"groups of 32 do not divide the 40 input channels of a weight \[96, 40\]"):
        CompressedWeight((96, 40), LinearScheme(WeightFormat(4, group_size=32)), True, {})
    with pytest.raises(UserError, match=r"80 input channels of a weight \[96, 80\] in NVFP4 are not a multiple of 64"):
        FP4Weight("NVFP4", (96, 80), {})


@each("name", ["weight_scale", "input_scale"])
def test_one_scale_cannot_be_several(name: str) -> None:
    assert layout(SCHEMES["fp8 per tensor"], {name: (40,)}).tensors()[name] == (1,)
    assert layout(SCHEMES["fp8 per tensor"], {name: ()}).tensors()[name] == ()


def test_an_impossible_group_index() -> None:
    scheme = SCHEMES["int4"]
    tensors = layout(scheme).write(stored(scheme)) | {"weight_g_idx": torch.zeros(128, dtype=torch.int32)}
    with pytest.raises(UserError, match="weight_g_idx does not put the 128 input channels into groups of 16"):
        layout(scheme, shapes(tensors)).read(tensors)


@each(
    ("change", "message"),
    [
        ({"quant_method": "quark"}, "quant_method='quark' is not supported: only .*compressed-tensors"),
        ({"format": "marlin-24"}, "format='marlin-24' is not supported"),
        ({"config_groups": {}}, "config_groups is empty"),
        (
            {"sparsity_config": {"format": "marlin-24"}},
            "format=.marlin-24. is not supported: only .dense., .sparse-bitmask.",
        ),
        ({"sparsity_config": {"rate": 1}}, "sparsity_config has settings that are not known: rate"),
        ({"ignore": "lm_head"}, "ignore is not a list of texts"),
        (
            {"config_groups": {"group_0": {"weights": {"type": "float", "strategy": "group", "group_size": 32}}}},
            "strategy='group' is not supported: only 'channel', 'tensor'",
        ),
        ({"new_key": 1}, "settings that are not known: new_key"),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "rotation": 1}}}},
            "group_0.weights has settings that are not known: rotation",
        ),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": False}}}},
            "group_0: symmetric=false is not supported with num_bits=8: only with 4",
        ),
    ],
)
def test_unknown_settings(change: dict[str, Any], message: str) -> None:
    values = write_config({LAYER.name: SCHEMES["int4"]}, [], permuted=False) | change
    with pytest.raises(UserError, match=message):
        read_quantization(ConfigReader({"quantization_config": values}, "config.json"), [])


def test_layers_are_found_by_name_by_expression_and_by_class() -> None:
    values = write_config({LAYER.name: SCHEMES["int4"]}, ["lm_head", "re:.*gate$"], permuted=False)
    other = write_config({LAYER.name: SCHEMES["int8"]}, [], permuted=False)["config_groups"]["group_0"] | {
        "targets": ["re:.*down_proj"]
    }
    values["config_groups"]["group_1"] = other
    config = read_quantization(ConfigReader({"quantization_config": values}, "config.json"), [])
    assert config is not None
    shapes = {
        name: config.scheme(LinearSpec(name, SHAPE, False, False), {})
        for name in ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.down_proj", "lm_head", "model.layers.0.mlp.gate")
    }
    assert list(shapes.values()) == [SCHEMES["int4"], SCHEMES["int8"], None, None]
    # A name is the best target, then an expression, then the class. The last group of a target replaces earlier groups.
    formats = {"int4": ["re:.*mlp.*"], "int8": ["Linear"], "a8w8 dynamic": ["model.layers.0.mlp.up_proj"]}
    formats |= {"int4 per channel": ["Linear"]}
    groups = {}
    for name, targets in formats.items():
        (group,) = write_config({LAYER.name: SCHEMES[name]}, [], permuted=False)["config_groups"].values()
        groups[name] = group | {"targets": targets}
    values = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    config = read_quantization(ConfigReader({"quantization_config": values}, "config.json"), [])
    assert config is not None
    by_target = {target: name for name, targets in formats.items() for target in targets}
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"):
        expected = by_target[match_targets(name, torch.nn.Linear(1, 1), by_target)[0]]
        assert config.scheme(LinearSpec(name, SHAPE, False, False), {}) == SCHEMES[expected]


@each(
    ("value", "message"),
    [("awq", "quantization_config='awq' is not of type dict"), ({"bits": 4}, "quant_method is missing")],
)
def test_an_invalid_quantization_config_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_quantization(ConfigReader({"quantization_config": value}, "config.json"), [])

"""AutoAWQ's and GPTQ's layouts compared with their definitions in plain loops."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import Weights
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from pipelines.loading.load_engine import load_engine
from quantization.codes import CodeKind
from quantization.layouts import awq, read_quantization
from quantization.layouts import gptq as gptq_layout
from quantization.layouts.awq import AwqWeight
from quantization.layouts.base import StoredQuantization, StoredWeight
from quantization.layouts.gptq import GptqWeight
from quantization.scheme import Activations, LinearScheme
from quantization.weight_format import QuantizedWeight, WeightFormat, quantize
from tests.helpers.builders import engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.gptq import hessian_of, rounded_by_gptq
from tests.helpers.packed_layouts import (
    AWQ,
    AWQ_ORDER,
    CASES,
    GPTQ,
    IN_ORDER,
    assert_same_model,
    awq_tensors,
    change,
    dequantised,
    gptq_tensors,
    groups_of,
    values_of,
    words,
    write_case,
    write_twins,
)
from tests.helpers.random_tensors import random

NAME = "model.layers.0.mlp.up_proj"
HALF_SCALES = torch.float16


def quantization(config: dict[str, Any]) -> StoredQuantization:
    stored = read_quantization(ConfigReader({"quantization_config": config}, "config.json"), [])
    assert stored is not None
    return stored


def read(config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layer = LinearSpec(NAME, shape, is_transposed=False, has_bias=False)
    layout = quantization(config).layout(layer, shapes)
    assert layout.tensors() == shapes
    return layout.read(tensors).weight


@each("size", [8, 24, -1])
@each("symmetric", [False, True])
def test_awq_is_its_definition(size: int, symmetric: bool) -> None:
    tensors, expected = awq_tensors(random(40, 72), size, symmetric)
    config = AWQ | {"group_size": size, "zero_point": not symmetric}
    assert read(config, tensors, (40, 72)).dequantize().equal(expected)  # the same products of the same two numbers


def test_awq_without_zero_points_is_centred() -> None:
    tensors, expected = awq_tensors(random(40, 64), 32, symmetric=True)
    del tensors["qzeros"]
    assert read(AWQ | {"zero_point": False}, tensors, (40, 64)).dequantize().equal(expected)


@each("version", ["gptq", "gptq_v2"])
@each("size", [32, 96, -1])
@each(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@each("shuffled", [False, True])
def test_gptq_is_its_definition(version: str, size: int, bits: int, symmetric: bool, shuffled: bool) -> None:
    config = GPTQ | {"bits": bits, "group_size": size, "sym": symmetric, "checkpoint_format": version}
    tensors, expected = gptq_tensors(random(40, 96), config, shuffled)
    weight = read(config | {"desc_act": shuffled}, tensors, (40, 96))
    assert weight.dequantize().equal(expected)
    assert (weight.permutation is None) == (not shuffled or size != 32)
    assert (weight.zero_points is None) == symmetric


def test_a_zero_point_of_0_is_read_as_gptqmodel_wrote_it() -> None:
    zeros = [[0, 15, 1, 0, 8, 0, 7, 3]]
    config = GPTQ | {"sym": False, "group_size": -1}
    less_one = (words(zeros, 4, IN_ORDER[4]).long() - 0x11111111).to(torch.int32)  # borrows from the next code
    tensors = {
        "qweight": torch.zeros(4, 8, dtype=torch.int32),
        "qzeros": less_one,
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    assert read(config, tensors, (8, 32)).dequantize()[:, 0].tolist() == [-z for z in zeros[0]]


@each("case", CASES)
def test_a_model_is_its_twin(case: str, tmp_path: Path) -> None:
    assert_same_model(*write_case(case, tmp_path))


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "autoround_version": "0.16.1"}


def test_rules_change_layers_and_leave_some_out(tmp_path: Path) -> None:
    """Rules of GPTQModel, and AutoRound's settings of layers in its own form."""
    rules = {r"-:.*\.1\.mlp": {}, r"+:.*k_proj": {"bits": 8, "group_size": -1}, r"model.*v_proj": {"sym": False}}
    layers = {
        r"layers\.1\.mlp\..*": {"bits": 16, "data_type": "float"},
        "k_proj": {"bits": 8, "group_size": -1},
        "model.layers.0.self_attn.v_proj": {"sym": False},
        "model.layers.1.self_attn.v_proj": {"sym": False, "act_bits": 16},
    }
    files = {
        "gptq": GPTQ | {"dynamic": rules},
        "v1": AUTO_ROUND | {"extra_config": layers, "block_name_to_quantize": "model.layers"},
        "v2": AUTO_ROUND | {"extra_config": layers, "packing_format": "auto_round"},
    }
    for form, config in files.items():
        version = {"checkpoint_format": "gptq_v2"} if form == "v2" else {}

        def encode(
            name: str, weight: Tensor, settings: dict[str, Any] = config | version, form: str = form
        ) -> tuple[dict[str, Tensor], Tensor]:
            layer_settings = {"k_proj": {"bits": 8, "group_size": -1}, "v_proj": {"sym": False}}.get(
                name.split(".")[-1], {}
            )
            if ".1.mlp" in name:
                return {"weight": weight}, weight
            tensors, expected = gptq_tensors(weight, settings | layer_settings)
            if form != "gptq":  # AutoRound writes no order
                del tensors["g_idx"]
            return tensors, expected

        assert_same_model(*write_twins(tmp_path / form, config, encode))


def test_autoround_writes_awq_tensors(tmp_path: Path) -> None:
    config = AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"lm_head": {"bits": 16}}}
    assert_same_model(*write_twins(tmp_path, config, lambda name, weight: awq_tensors(weight, 32, symmetric=True)))
    for message, others in {
        "packing_format='auto_round:fp8' is not supported": {"packing_format": "auto_round:fp8"},
        "several formats or bits=8": {"extra_config": {".*q_proj": {"group_size": 64}}},
        "act_bits=8 is not supported": {"act_bits": 8},
        "'lm_head' has unknown settings: rank": {"extra_config": {"lm_head": {"rank": 3}}},
        "could take too long": {"extra_config": {"(((a*)*)*)*b": {}}},
    }.items():
        with pytest.raises(UserError, match=message):
            quantization(config | others)


def test_biases_of_zero_that_old_files_have(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, expected = gptq_tensors(weight, GPTQ)
        return tensors | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, expected

    packed, floats = write_twins(tmp_path, GPTQ, encode)
    assert_same_model(packed, floats)
    change(packed, f"{NAME}.bias", torch.ones(96, dtype=torch.float16))
    with pytest.raises(UserError, match=f"{NAME}: bias is not 0, but a layer of this model has none"):
        engine_of(packed)


FORMATS = {
    "int4": WeightFormat(4, group_size=32, scale_dtype=HALF_SCALES),
    "int4 per channel": WeightFormat(4, scale_dtype=HALF_SCALES),
    "int4 asymmetric": WeightFormat(4, symmetric=False, group_size=16, scale_dtype=HALF_SCALES),
    "int8": WeightFormat(8, scale_dtype=HALF_SCALES),
    "int8 groups": WeightFormat(8, group_size=32, scale_dtype=HALF_SCALES),
}


def assert_equal(back: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert back.codes.equal(expected.codes)
    assert back.scales.equal(expected.scales)
    assert (back.zero_points is None) == (expected.zero_points is None)
    assert back.zero_points is None or back.zero_points.equal(expected.zero_points)  # type: ignore[arg-type]


@each("name", [name for name in FORMATS if name.startswith("int4")])
def test_awq_is_written_as_defined_and_read_again(name: str) -> None:
    format = FORMATS[name]
    weight = quantize(random(48, 96), format)
    config = awq.write_config({NAME: LinearScheme(format)}, ["lm_head"])
    tensors = AwqWeight((48, 96), format).write(StoredWeight(weight))
    codes, zeros = (torch.tensor(values_of(tensors[key], 4, AWQ_ORDER)).T for key in ("qweight", "qzeros"))
    group_of = groups_of(96, config["group_size"])
    assert dequantised(codes, zeros, tensors["scales"].T.float(), group_of).equal(weight.dequantize())
    assert_equal(read(config, tensors, (48, 96)), weight)


@each("name", FORMATS)
def test_gptq_is_written_as_defined_and_read_again(name: str) -> None:
    format = FORMATS[name]
    weight = random(48, 96)
    weight[3] = weight[3].abs() + 1  # zero points of 0, and in the next line of 15
    weight[4] = -weight[3]
    quantised = quantize(weight, format)
    config = gptq_layout.write_config({NAME: LinearScheme(format)}, ["lm_head"], act_order=False)
    is_v1 = config["checkpoint_format"] == "gptq"
    assert is_v1 == format.symmetric
    tensors = GptqWeight((48, 96), format, is_v1).write(StoredWeight(quantised))
    bits = format.bits
    codes = torch.tensor(values_of(tensors["qweight"].T, bits, IN_ORDER[bits]))
    zeros = torch.tensor(values_of(tensors["qzeros"], bits, IN_ORDER[bits])).T + is_v1
    expected = dequantised(codes, zeros, tensors["scales"].T.float(), tensors["g_idx"].tolist())
    assert expected.equal(quantised.dequantize())
    assert_equal(read(config, tensors, (48, 96)), quantised)


def test_act_order_survives_a_round_trip() -> None:
    format = FORMATS["int4 asymmetric"]
    hessian = hessian_of(random(300, 96, seed=2) * torch.linspace(0.1, 3, 96))
    quantised = rounded_by_gptq(random(48, 96), hessian, format, static_groups=False)
    assert quantised.permutation is not None
    config = gptq_layout.write_config({NAME: LinearScheme(format)}, [], act_order=True)
    tensors = GptqWeight((48, 96), format, is_v1=False).write(StoredWeight(quantised))
    back = read(config, tensors, (48, 96))
    assert back.permutation is not None
    assert back.dequantize().equal(quantised.dequantize())
    with pytest.raises(UserError, match="AWQ holds input channels in their own order"):
        AwqWeight((48, 96), format).write(StoredWeight(quantised))


def test_several_schemes_are_rules() -> None:
    usual, other = LinearScheme(FORMATS["int4"]), LinearScheme(FORMATS["int8"])
    schemes = {NAME: usual, "model.layers.1.mlp.up_proj": usual, "model.layers.0.mlp.down_proj": other}
    config = gptq_layout.write_config(schemes, ["model.layers.1.mlp.down_proj"], act_order=False)
    stored, shapes = quantization(config), {"qweight": (1, 1)}
    for name, scheme in {**schemes, "model.layers.1.mlp.down_proj": None}.items():
        layer_scheme = stored.scheme(LinearSpec(name, (32, 32), False, False), shapes)
        assert layer_scheme == (scheme and LinearScheme(replace(scheme.weights, scale_dtype=torch.float32)))


@each(
    ("scheme", "message"),
    [
        (
            LinearScheme(WeightFormat(8)),
            "AWQ holds int4 weights, not int8 per channel: give quantize.format=compressed_tensors",
        ),
        (LinearScheme(WeightFormat(4), Activations.dynamic), "AWQ holds int4 weights, not int4 .* activations"),
        (LinearScheme(WeightFormat(8, CodeKind.FP8)), "AWQ holds int4 weights, not fp8 per channel"),
    ],
)
def test_schemes_that_awq_cannot_store(scheme: LinearScheme, message: str) -> None:
    with pytest.raises(UserError, match=message):
        awq.write_config({NAME: scheme}, [])


def test_writers_refuse_schemes_that_their_format_lacks() -> None:
    int4, int8 = LinearScheme(WeightFormat(4)), LinearScheme(WeightFormat(4, group_size=32))
    with pytest.raises(UserError, match="AWQ holds one scheme for all layers, not several"):
        awq.write_config({NAME: int4, "b": int8}, [])
    with pytest.raises(UserError, match=r"AWQ has no quantised head: give quant.skip=\[lm_head\]"):
        awq.write_config({"lm_head": int4}, [])
    with pytest.raises(UserError, match="8 output channels, which do not divide a weight \\[36, 96\\]"):
        AwqWeight((36, 96), int4.weights)
    with pytest.raises(UserError, match="GPTQ holds int4 and int8 weights, not fp8 per channel"):
        gptq_layout.write_config({NAME: LinearScheme(WeightFormat(8, CodeKind.FP8))}, [], act_order=False)
    weight = StoredWeight(quantize(random(48, 96), int4.weights))
    for layout in (AwqWeight((48, 96), int4.weights), GptqWeight((48, 96), int4.weights, is_v1=True)):
        with pytest.raises(UserError, match="scales in float16, but these were chosen in float32"):
            layout.write(weight)


@each(
    ("config", "message"),
    [
        (AWQ | {"version": "GEMV"}, "version='gemv' of AWQ is not supported: only 'gemm'"),
        (AWQ | {"version": "gemv_fast"}, "version='gemv_fast' of AWQ is not supported"),
        (AWQ | {"version": "marlin"}, "version='marlin' of AWQ is not supported"),
        (AWQ | {"bits": 3}, "bits=3 is not supported: only 4"),
        (AWQ | {"group_size": 0}, "group_size=0 is not a number above 0"),
        (GPTQ | {"act_bits": 8}, "act_bits=8 is not supported: only None, 16, 32"),
        (AWQ | {"extra_config": {"x": {"bits": 8}}}, "extra_config={'x': {'bits': 8}} is not supported"),
        (AWQ | {"rotation": "x"}, "settings that are not known: rotation"),
        (GPTQ | {"bits": 3}, "bits=3 is not supported: only 4, 8"),
        (GPTQ | {"bits": 8, "sym": False}, "sym=false with bits=8 is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported: only 'gptq', 'gptq_v2'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True is not supported"),
        (GPTQ | {"group_size": "a"}, "group_size='a' is not of type int"),
        (GPTQ | {"new_key": 1}, "settings that are not known: new_key"),
        (GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, r"quantization_config: '\(' is not a regular expression"),
        (GPTQ | {"dynamic": {"x": {"bits": 2}}}, "bits=2 is not supported"),
        (GPTQ | {"dynamic": {"x": {"adapter": 1}}}, "dynamic: 'x' has settings that are not known: adapter"),
    ],
)
def test_unknown_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        quantization(config)


@each(
    ("method", "tensor_name", "tensor", "message"),
    [
        ("awq", "scales", None, f"missing: {NAME}.scales"),
        ("awq", "qzeros", None, f"missing: {NAME}.qzeros"),
        ("awq", "qweight", torch.zeros(32, 12, dtype=torch.int32), rf"{NAME}.qweight \[32, 12\], expected \[64, 12\]"),
        ("awq", "qweight", torch.zeros(64, 12), f"{NAME}: qweight is torch.float32, expected torch.int32"),
        ("awq", "scales", torch.full((2, 96), torch.nan), f"{NAME}: scales has values that are not finite"),
        ("gptq", "scales", None, f"missing: {NAME}.scales"),
        ("gptq", "g_idx", None, f"missing: {NAME}.g_idx"),
        ("gptq", "scales", torch.ones(96, 2), rf"{NAME}.scales \[96, 2\], expected \[2, 96\]"),
        ("gptq", "scales", torch.full((2, 96), -torch.inf), f"{NAME}: scales has values that are not finite"),
        (
            "gptq",
            "qzeros",
            torch.zeros(2, 12, dtype=torch.int32),
            f"{NAME}: qzeros has zero points other than 8, but .* sym=true",
        ),
        (
            "gptq",
            "g_idx",
            torch.full((64,), 7, dtype=torch.int32),
            f"{NAME}: g_idx does not put the 64 input channels into",
        ),
        ("gptq", "g_idx", torch.zeros(64), f"{NAME}: g_idx is torch.float32, expected torch.int32"),
    ],
)
def test_damaged_tensors(method: str, tensor_name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    config = AWQ if method == "awq" else GPTQ | {"desc_act": True}

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return awq_tensors(weight, 32) if method == "awq" else gptq_tensors(weight, config)

    packed, _ = write_twins(tmp_path, config, encode)
    change(packed, f"{NAME}.{tensor_name}", tensor)
    with pytest.raises(UserError, match=message):
        engine_of(packed)


def test_groups_that_the_kernels_lack(tmp_path: Path) -> None:
    """Groups of 96 inputs are three groups of 32. Two groups of 48 are not groups of 64 and 32."""
    for size, problem in (
        (24, "q_proj: groups of 24 do not divide the 64 input channels of a weight"),
        (16, "_proj: groups of 16 input channels are not supported: only multiples of 32, and whole rows"),
        (48, "_proj: groups of 48 input channels are not supported: only multiples of 32, and whole rows"),
    ):
        encode = partial(lambda size, name, weight: awq_tensors(weight, size), 32 if size == 24 else size)
        sizes = {"hidden_size": 96} if size == 48 else {}
        packed, _ = write_twins(tmp_path / str(size), AWQ | {"group_size": size}, encode, **sizes)
        with pytest.raises(UserError, match=problem):
            engine_of(packed)
    sizes = {"hidden_size": 96, "intermediate_size": 192}
    twins = write_twins(
        tmp_path / "96", AWQ | {"group_size": 96}, lambda name, weight: awq_tensors(weight, 96), **sizes
    )
    assert_same_model(*twins)


def test_random_weights_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    packed, _ = write_twins(tmp_path, AWQ, lambda name, weight: awq_tensors(weight, 32))
    with pytest.raises(UserError, match="model.weights=random makes float weights, but this checkpoint is quantised"):
        load_engine(run_config(packed, weights=Weights.random), 3)


def test_every_key_of_a_quantised_config_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = write_twins(tmp_path, AWQ, lambda name, weight: awq_tensors(weight, 32))
    engine_of(packed)
    assert "not used" not in caplog.text

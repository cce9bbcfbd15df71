"""Checkpoints of FP4 weights compared with twins that hold the floats of the package compressed-tensors."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4, MXFP4A16, NVFP4, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file
from torch import Tensor

from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import Activations, BlockActivations, QuantConfig, QuantScheme
from models.config import ConfigReader
from models.layers.linear import Linear
from models.layers.linear_method import LinearMethod
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from quantization.layouts import read_quantization
from quantization.linear import BlockMethod, Float8Method
from tests.helpers.builders import engine_of, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.packed_layouts import assert_same_model, change, write_twins

SIZES = {"intermediate_size": 128, "hidden_size": 128}  # multiples of a block of NVFP4
MODELOPT: dict[str, Any] = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
HUB: dict[str, Any] = {
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.41.0"},
    "quant_method": "modelopt",
}
UP = "model.layers.0.mlp.up_proj"


def config_of(scheme: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the `quantization_config` as the package writes it."""
    file_format = "mxfp4-pack-quantized" if scheme["weights"].group_size == 32 else "nvfp4-pack-quantized"
    group = QuantizationScheme(targets=["Linear"], format=file_format, **scheme)
    config = QuantizationConfig(config_groups={"group_0": group}, format=file_format, ignore=["lm_head"])
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    values["config_groups"]["group_0"]["weights"] |= settings
    return values


def compressed(scheme: dict[str, Any], weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors and the float32 values of a weight that the package quantises."""
    group = QuantizationScheme(targets=["Linear"], **scheme)
    args = group.weights
    assert args is not None
    is_nvfp4 = args.group_size == 16
    compressor = NVFP4PackedCompressor if is_nvfp4 else MXFP4PackedCompressor
    state = {"weight_global_scale": generate_gparam(weight.min(), weight.max())} if is_nvfp4 else {}
    low, high = weight.unflatten(1, (-1, args.group_size)).aminmax(dim=2)
    scales, _ = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    tensors = compressor.compress({"weight": weight, "weight_scale": scales, **state}, group)
    values = compressor.decompress(dict(tensors), group)["weight"]
    if group.input_activations is not None and is_nvfp4:
        tensors["input_global_scale"] = torch.tensor([300.0])
    return tensors, values


def modelopt(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a weight as ModelOpt stores it."""
    tensors: dict[str, Tensor] = {"input_scale": torch.tensor(0.002)}
    stored, _ = compressed(NVFP4A16, weight)
    factor = 1 / stored["weight_global_scale"][0]
    tensors |= {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"], "weight_scale_2": factor}
    numbers = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
    scales = (stored["weight_scale"].float() * factor).repeat_interleave(16, 1)
    return tensors, numbers * scales


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "mxfp4": (config_of(MXFP4A16), lambda _, weight: compressed(MXFP4A16, weight)),
    "mxfp4, FP4 activations": (config_of(MXFP4), lambda _, weight: compressed(MXFP4, weight)),
    "nvfp4": (config_of(NVFP4A16), lambda _, weight: compressed(NVFP4A16, weight)),
    "nvfp4, FP4 activations": (config_of(NVFP4), lambda _, weight: compressed(NVFP4, weight)),
    "modelopt": (HUB, modelopt),
}


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4, "unpack_fp4_from_uint8", partial(unpack_fp4_from_uint8, dtype=torch.float32))


def gpu_method(folder: Path, quant: QuantConfig) -> LinearMethod:
    """Return the method of a layer that is planned for a GPU."""
    run = run_config(folder)
    layer = plan_model(
        run.model, quant, resolve_model(run.model), torch.device("cuda"), packed=False
    ).model.get_submodule(UP)
    assert isinstance(layer, Linear)
    return layer.method


@each("case", CASES)
def test_a_model_is_its_twin(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    config, encode = CASES[case]
    packed, floats = write_twins(tmp_path, config, encode, **SIZES)
    assert_same_model(packed, floats, QuantConfig(block_activations=BlockActivations.none))
    has_float_activations = config.get("quant_method") != "modelopt" and "activations" not in case
    assert ("which stay floats here" in caplog.text) != has_float_activations
    assert "not used" not in caplog.text.replace("hardware is not used", "")
    assert isinstance(gpu_method(packed, QuantConfig()), BlockMethod)


def test_a_gpu_holds_fp4_but_no_other_blocks(tmp_path: Path) -> None:
    write_llama(tmp_path, **SIZES)
    for scheme in (QuantScheme.mxfp4, QuantScheme.nvfp4):
        method = gpu_method(tmp_path, QuantConfig(scheme))
        assert isinstance(method, BlockMethod)
        assert method.scheme.weights.kind.name == scheme.name.upper()
    with pytest.raises(
        UserError, match="quant=q4_k is for a CPU, not device=cuda: give quant=int4, int8, mxfp4 or nvfp4"
    ):
        gpu_method(tmp_path, QuantConfig(QuantScheme.q4_k))


@pytest.mark.long
def test_modelopt_with_a_config_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NVFP4 and fp8 layers, scales of the KV cache, and no quantization_config in config.json."""
    packed, floats = write_twins(tmp_path, {}, modelopt, **SIZES)
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "hf_quant_config.json").write_text(json.dumps({"quantization": MODELOPT}))
    change(packed, "model.layers.0.self_attn.k_proj.k_scale", torch.tensor(0.5))
    assert_same_model(packed, floats, QuantConfig(block_activations=BlockActivations.none))
    assert "the checkpoint's scales of the KV cache are not used" in caplog.text
    weight, scale = load_file(floats / "model.safetensors")[f"{UP}.weight"], torch.tensor(0.01)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    for name, tensor in {"weight": codes, "weight_scale": scale, "weight_scale_2": None}.items():
        change(packed, f"{UP}.{name}", tensor)
    layer = engine_of(packed).executor.model.get_submodule(UP)
    assert isinstance(layer, Linear)
    assert isinstance(layer.method, Float8Method)
    assert layer.method.scheme.activations is Activations.static
    assert layer.method.input_scale == torch.tensor(0.002)


@each(
    ("config", "message"),
    [
        (config_of(MXFP4A16, group_size=64), "group_size=64 is not supported: only 32"),
        (config_of(NVFP4A16, group_size=32), "group_size=32 is not supported: only 16"),
        (config_of(NVFP4A16, strategy="channel"), "strategy='channel' is not supported: only 'group', 'tensor_group'"),
        (
            config_of(NVFP4A16, scale_dtype="torch.uint8"),
            "scale_dtype='torch.uint8' is not supported: only None, 'torch.f",
        ),
        (config_of(NVFP4A16, symmetric=False), "symmetric=False is not supported"),
        (config_of(NVFP4A16, rotation=1), "group_0.weights has settings that are not known: rotation"),
        (
            HUB | {"quant_algo": "NVFP4_AWQ"},
            "quant_algo='NVFP4_AWQ' is not supported: only 'FP8', 'NVFP4', 'W4A16_NVFP4'",
        ),
        (HUB | {"group_size": 32}, "group_size=32 is not supported: only None, 16"),
        (HUB | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}, "quant_algo='W4A8_AWQ' is not supported"),
        (HUB | {"new_key": 1}, "settings that are not known: new_key"),
    ],
)
def test_unknown_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_quantization(ConfigReader({"quantization_config": config}, "config.json"), [])


@pytest.mark.long
@each(
    ("case", "name", "tensor", "message"),
    [
        (
            "mxfp4",
            "weight_scale",
            torch.full((128, 4), 255, dtype=torch.uint8),
            f"{UP}: weight_scale has values that are not",
        ),
        ("mxfp4", "weight_scale", torch.ones(128, 4), f"{UP}: weight_scale is torch.float32, expected torch.uint8"),
        ("mxfp4", "weight_scale", torch.ones(128, 8), rf"{UP}.weight_scale \[128, 8\], expected \[128, 4\]"),
        ("mxfp4", "weight_packed", None, f"missing: {UP}.weight_packed"),
        (
            "nvfp4",
            "weight_scale",
            torch.full((128, 8), torch.nan).to(torch.float8_e4m3fn),
            f"{UP}: weight_scale has values",
        ),
        (
            "nvfp4",
            "weight_scale",
            torch.full((128, 8), 255, dtype=torch.uint8).view(torch.float8_e4m3fn),
            f"{UP}: weight_scale has values",
        ),
        (
            "nvfp4",
            "weight_scale",
            torch.ones(128, 4).to(torch.float8_e4m3fn),
            rf"{UP}.weight_scale \[128, 4\], expected \[128, 8\]",
        ),
        (
            "nvfp4",
            "weight_global_scale",
            torch.zeros(1),
            f"{UP}: weight_global_scale has values that are not finite numbers",
        ),
        ("nvfp4", "weight_global_scale", torch.ones(2), rf"{UP}.weight_global_scale \[2\], expected \[1\]"),
        ("modelopt", "weight", torch.zeros(128, 128), rf"{UP}.weight \[128, 128\], expected \[128, 64\]"),
    ],
)
def test_damaged_tensors(case: str, name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    packed, _ = write_twins(tmp_path, *CASES[case], **SIZES)
    change(packed, f"{UP}.{name}", tensor)
    with pytest.raises(UserError, match=message):
        engine_of(packed)

"""Checkpoints of fp8 weights compared with transformers' dequantisation, and with a layer in plain PyTorch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import FP8_BLOCK
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM, FineGrainedFP8Config, LlamaForCausalLM

from conf.errors import UserError
from conf.quantization import Activations
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.layouts import read_quantization
from quantization.layouts.base import StoredWeight
from quantization.linear import Float8Method
from quantization.scheme import LinearScheme
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.cases import each
from tests.helpers.fp8_layouts import BLOCKS, INPUT_SCALE, SMALL_BLOCKS, encode
from tests.helpers.oracle import random_prompts, write_model
from tests.helpers.packed_layouts import assert_rows_are_independent, change, write_twins
from tests.helpers.random_tensors import random

NAME = "model.layers.0.mlp.up_proj"
HUGE_BLOCKS = BLOCKS | {"weight_block_size": [2**40, 2**40]}  # such a size must not be allocated
WHOLE = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}


def rounded(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Return x [..., I] rounded to e4m3 codes: with one scale, or with one per token and per 128 channels or all
    channels."""
    size = config["weight_block_size"][1] if "weight_block_size" in config else x.shape[-1]
    out = torch.empty_like(x)
    for start in range(0, x.shape[-1], size):
        part = x[..., start : start + size]
        scale = part.abs().amax(-1, keepdim=True) / 448
        if config["activation_scheme"] == "static":
            scale = torch.tensor(INPUT_SCALE)
        out[..., start : start + size] = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return out


def compressed_blocks(block: list[int]) -> dict[str, Any]:
    """Return the settings of compressed-tensors for these blocks, as the package writes them."""
    group = QuantizationScheme(targets=["Linear"], **FP8_BLOCK)
    assert group.weights is not None
    assert group.input_activations is not None
    group.weights.block_structure, group.input_activations.group_size = block, block[1]
    return QuantizationConfig(config_groups={"blocks": group}, format="float-quantized").model_dump(mode="json")


def read(
    config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]
) -> tuple[LinearScheme, StoredWeight]:
    stored = read_quantization(ConfigReader({"quantization_config": config}, "config.json"), [])
    layer = LinearSpec(NAME, shape, is_transposed=False, has_bias=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert stored is not None
    scheme, layout = stored.scheme(layer, shapes), stored.layout(layer, shapes)
    assert scheme is not None
    assert layout.tensors() == shapes
    return scheme, layout.read(tensors)


@each("shape", [(128, 256), (130, 384), (72, 200), (1, 64)])
@each("config", [BLOCKS, SMALL_BLOCKS, HUGE_BLOCKS, WHOLE])
def test_weights_are_transformers(config: dict[str, Any], shape: tuple[int, int]) -> None:
    tensors, expected = encode(config, random(*shape) * torch.linspace(0.1, 3, shape[1]))
    scheme, stored = read(config, tensors, shape)
    assert stored.weight.dequantize().equal(expected)  # the same products of two numbers
    if block := config.get("weight_block_size"):
        tensors["weight_scale"] = tensors.pop("weight_scale_inv")
        same, again = read(compressed_blocks(block), tensors, shape)
        assert same == scheme
        assert again.weight.dequantize().equal(expected)


@each("shape", [(128, 256), (130, 384), (72, 200)])
@each("config", [BLOCKS, SMALL_BLOCKS, HUGE_BLOCKS, WHOLE, STATIC])
@each("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_the_product_of_rounded_activations(
    config: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    tensors, weight = encode(config, random(*shape))
    scheme, stored = read(config, tensors, shape)
    method = Float8Method(scheme, None, shape)  # type: ignore[arg-type]
    method.hold(stored, torch.device("cpu"))
    x = (random(5, shape[1], seed=1) * torch.linspace(0.1, 3, shape[1])).to(dtype)
    expected = rounded(x.float(), config).double() @ weight.double().T
    # float32: sums of up to 384 terms. bfloat16: the product, its scale and the result are rounded, each by 2^-9.
    tolerance = 1e-5 if dtype is torch.float32 else 3 * 2**-9
    error = (method.apply(x, None).double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance
    assert method.apply(x, None)[2].equal(method.apply(x[2:3], None)[0])


@each("config", [BLOCKS, SMALL_BLOCKS, WHOLE, STATIC])
def test_a_model_is_transformers_with_such_layers(config: dict[str, Any], tmp_path: Path) -> None:
    packed, floats = write_twins(tmp_path, config, lambda name, weight: encode(config, weight))
    reference = LlamaForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], config),))
    packed_engine, plain = engine_of(packed), engine_of(floats)
    for prompt in random_prompts(96, (5, 40)):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        error = (all_logits(packed_engine, prompt) - expected).square().mean().sqrt() / expected.std()
        unrounded = (all_logits(plain, prompt) - expected).square().mean().sqrt() / expected.std()
        # An activation between two codes may round to either, because float32 sums have another order.
        assert error < 0.01 < unrounded
    assert_rows_are_independent(packed_engine, random_prompts(96, (5, 1, 17)))


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    config = BLOCKS | {"weight_block_size": [32, 16]}  # these divide all layers, as transformers requires
    packed, floats = write_twins(tmp_path, config, lambda name, weight: encode(config, weight))
    settings = FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 16))
    reference = LlamaForCausalLM.from_pretrained(packed, dtype=torch.float32, quantization_config=settings)
    expected = load_file(floats / "model.safetensors")
    for name, tensor in reference.state_dict().items():
        assert tensor.equal(expected[name]), name


def test_names_of_transformers_for_one_scale() -> None:
    tensors, expected = encode(STATIC, random(72, 64))
    names = {"weight": "weight", "weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    scheme, stored = read(STATIC, {names[tensor_name]: tensor for tensor_name, tensor in tensors.items()}, (72, 64))
    assert scheme.activations is Activations.static
    assert stored.weight.dequantize().equal(expected)
    assert stored.input_scale == INPUT_SCALE


def test_a_layer_that_the_model_keeps_in_floats_is_dequantised(tmp_path: Path) -> None:
    """DeepSeek's kv_b_proj, whose weight is used in other ways too, is fp8 in DeepSeek's own files."""
    packed, floats = tmp_path / "packed", tmp_path / "floats"
    write_model(floats, DeepseekV3ForCausalLM, **DEEPSEEK)
    plain = load_file(floats / "model.safetensors")
    quantised = dict(plain)
    for name, tensor in plain.items():
        if name.endswith("kv_b_proj.weight"):
            tensors, plain[name] = encode(BLOCKS, tensor)
            quantised |= {name: tensors["weight"], f"{name}_scale_inv": tensors["weight_scale_inv"]}
    save_file(plain, floats / "model.safetensors")
    packed.mkdir()
    save_file(quantised, packed / "model.safetensors")
    config = json.loads((floats / "config.json").read_text()) | {"quantization_config": BLOCKS}
    (packed / "config.json").write_text(json.dumps(config))
    assert all_logits(engine_of(packed), [1, 2, 3, 4, 5]).equal(all_logits(engine_of(floats), [1, 2, 3, 4, 5]))


@each(
    ("config", "message"),
    [
        (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (BLOCKS | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' is not supported"),
        (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size=\[128\] is not a list of two numbers above 0"),
        (BLOCKS | {"weight_block_size": [0, 128]}, "is not a list of two numbers above 0"),
        (BLOCKS | {"weight_block_size": [True, 128]}, "is not a list of two numbers above 0"),
        (BLOCKS | {"activation_scheme": "static"}, "activation_scheme='static' is not supported: only 'dynamic'"),
        (BLOCKS | {"activation_scheme": "none"}, "activation_scheme='none' is not supported"),
        (BLOCKS | {"new_key": 1}, "settings that are not known: new_key"),
    ],
)
def test_unknown_settings(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_quantization(ConfigReader({"quantization_config": config}, "config.json"), [])


@each(
    ("tensor_name", "tensor", "message"),
    [
        ("weight_scale_inv", None, f"{NAME}.weight is torch.float8_e4m3fn, but its layer is not quantised: .* scales"),
        ("weight_scale_inv", torch.full((2, 2), torch.nan), "weight_scale_inv has values that are not finite"),
        ("weight_scale_inv", torch.full((2, 2), torch.nan), "weight_scale_inv has values that are not finite"),
        ("weight_scale_inv", torch.ones(2, 3), rf"{NAME}.weight_scale_inv \[2, 3\], expected \[2, 2\]"),
        ("weight", torch.zeros(96, 64), f"{NAME}: weight is torch.float32, expected torch.float8_e4m3fn"),
        ("weight", None, f"missing: {NAME}.weight"),
    ],
)
def test_damaged_tensors(tensor_name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    packed, _ = write_twins(tmp_path, SMALL_BLOCKS, lambda name, weight: encode(SMALL_BLOCKS, weight))
    change(packed, f"{NAME}.{tensor_name}", tensor)
    with pytest.raises(UserError, match=message):
        engine_of(packed)


def test_one_scale_cannot_be_several(tmp_path: Path) -> None:
    packed, _ = write_twins(tmp_path, WHOLE, lambda name, weight: encode(WHOLE, weight))
    change(packed, f"{NAME}.weight_scale", torch.ones(96))
    with pytest.raises(UserError, match=rf"{NAME}.weight_scale \[96\], expected \[1\]"):
        engine_of(packed)

"""Checkpoints of BitNet's ternary weights compared with transformers, which packs the weights of the tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitNetForCausalLM, LlamaForCausalLM
from transformers.integrations.bitnet import pack_weights

from conf.errors import UserError
from models.config import ConfigReader
from models.linear_layers import LinearSpec
from quantization.layouts import read_quantization
from quantization.layouts.sharded import ShardedLayout
from tests.helpers.builders import all_logits, engine_of
from tests.helpers.oracle import TOLERANCE, random_prompts, write_model
from tests.helpers.packed_layouts import assert_rows_are_independent
from tests.helpers.random_tensors import random

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


def settings(linear_class: str = "autobitlinear", mode: str = "offline", **others: Any) -> dict[str, Any]:
    return {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": mode, **others}


def ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes -1, 0 and 1 in floats, and their scale."""
    scale = weight.abs().mean()
    return (weight / scale).round().clamp(-1, 1), scale


def write_packed(folder: Path, quantization: dict[str, Any]) -> None:
    """Give a float model's folder this `quantization_config`, with packed weights if it is not online."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight") and "offline" in quantization.values()]:
        codes, scale = ternary(tensors[name])
        tensors[name] = pack_weights(codes)
        scale = 1 / scale if quantization["linear_class"] == "bitlinear" else scale
        tensors[f"{name.removesuffix('weight')}weight_scale"] = scale.reshape(1)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def test_models_are_transformers(tmp_path: Path) -> None:
    files = [settings("bitlinear"), settings(), settings(mode="online")]
    skipped = settings(mode="online", modules_to_not_convert=["lm_head", "model.layers.1", "mlp.down_proj"])
    torch.compiler.set_stance("force_eager")  # transformers' layers compile themselves
    try:
        for number, quantization in enumerate([*files, skipped]):
            family = BitNetForCausalLM if number % 2 else LlamaForCausalLM
            folder = tmp_path / str(number)
            write_model(folder, family, **SIZES, tie_word_embeddings=bool(number % 2))
            write_packed(folder, quantization)
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            engine, prompts = engine_of(folder), random_prompts(reference.config.vocab_size, (40, 1, 5))
            with torch.no_grad():
                expected = reference(torch.tensor([prompts[0]])).logits[0]
            torch.testing.assert_close(all_logits(engine, prompts[0]), expected, atol=TOLERANCE, rtol=0)
            assert_rows_are_independent(engine, prompts)
            linear = engine.executor.model.get_submodule("model.layers.0.mlp.up_proj")
            assert sum(part.nbytes for part in linear.parameters()) < 0.7 * linear.shape[0] * linear.shape[1]  # type: ignore[index, operator]
    finally:
        torch.compiler.set_stance("default")


def test_packed_weights_of_any_number_of_outputs() -> None:
    """The rows of a rank are rows of the whole weight. Impossible values are refused."""

    def layout_of(quantization: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        stored = read_quantization(ConfigReader({"quantization_config": quantization}, "config.json"), [])
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        layer = LinearSpec("model.layers.0.mlp.up_proj", (10, 6), is_transposed=False, has_bias=False)
        assert stored is not None
        assert stored.scheme(layer, shapes) is not None
        layout = stored.layout(layer, shapes)
        assert layout.tensors() == shapes
        return layout

    codes, scale = ternary(random(10, 6))
    packed = pack_weights(codes.clone())
    tensors = {"weight": packed, "weight_scale": scale.reshape(1)}
    layout = layout_of(settings(), tensors)
    assert layout.read(tensors).weight.dequantize().equal(codes * scale)
    part = ShardedLayout(layout, (range(1, 3), range(7, 10)))
    assert part.read(tensors).weight.dequantize().equal((codes * scale)[[1, 2, 7, 8, 9]])
    wrong = {
        "codes that are not -1, 0 or 1": {"weight": packed | 3},
        "weight is torch.int8, expected torch.uint8": {"weight": packed.view(torch.int8)},
        "weight_scale has values that are not finite": {"weight_scale": torch.tensor([torch.nan])},
        "weight_scale has values that are not finite numbers above 0": {"weight_scale": torch.zeros(1)},
    }
    for message, changed in wrong.items():
        with pytest.raises(UserError, match=message):
            layout.read(tensors | changed)
    whole_numbers = {"weight": torch.ones(10, 6, dtype=torch.int64)}
    online = layout_of(settings(mode="online"), whole_numbers)
    with pytest.raises(UserError, match=r"weight is torch.int64, expected floats"):
        online.read(whole_numbers)
    for message, others in {
        "use_rms_norm=True is not supported": {"use_rms_norm": True},
        "modules_to_not_convert=3 is not a list of names": {"modules_to_not_convert": 3},
        "settings that are not known: bits": {"bits": 2},
    }.items():
        with pytest.raises(UserError, match=message):
            layout_of(settings(**others), tensors)

"""Merged adapters compared with PEFT's own merge_and_unload() in transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from conf.errors import UserError
from models.causal_lm import CausalLM
from models.formats import open_checkpoint
from models.formats.base import WeightFile
from models.formats.lora import merge_lora
from models.registry import find_architecture
from models.weights import load_weights, parameter_shapes
from tests.helpers.builders import all_logits, run_config, unpacked_engine, write_llama
from tests.helpers.cases import each
from tests.helpers.merged_adapters import PROMPT, write_adapter

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def write_gpt2(folder: Path, **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return model


def base_files(folder: Path) -> tuple[list[WeightFile], CausalLM]:
    checkpoint = open_checkpoint(folder, allow_pickle=False)
    architecture = find_architecture(checkpoint.config)
    with torch.device("meta"):
        model = architecture.build(architecture.read_config(checkpoint.config))
    return checkpoint.open_weights(parameter_shapes(model)), model


def merge(tmp_path: Path) -> list[WeightFile]:
    files, model = base_files(tmp_path / "base")
    return merge_lora(files, tmp_path / "adapter", model)


def merged_logits(tmp_path: Path) -> Tensor:
    """Return logits [T, V] of an engine with the merged weights."""
    engine = unpacked_engine(run_config(tmp_path / "base"), 3)
    load_weights(
        engine.executor.model, merge(tmp_path), (), torch.float32, torch.device("cpu"), lambda done, total: None
    )
    return all_logits(engine, PROMPT)


def assert_as_peft(tmp_path: Path, expected: Tensor, base: PreTrainedModel) -> None:
    """Compare with PEFT. Both use float32 sums in different orders: 1e-4 of the largest logit. The adapter must change
    the logits."""
    with torch.inference_mode():
        unchanged = base(torch.tensor([PROMPT])).logits[0]
    tolerance = 1e-4 * expected.abs().max().item()
    assert (unchanged - expected).abs().max() > 100 * tolerance
    assert (merged_logits(tmp_path) - expected).abs().max() < tolerance


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@each(
    "config",
    [
        {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, "lora_alpha": 5, "target_modules": ALL_LINEAR},
        {"r": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {
            "r": 2,
            "target_modules": ALL_LINEAR,
            "rank_pattern": {"^model.layers.1.self_attn.q_proj": 7, "down_proj": 3, "layers.0.mlp.down_proj": 5},
            "alpha_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 32},
        },
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["o_proj"], "modules_to_save": ["norm"]},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    ],
)
def test_llama_as_peft(config: dict[str, Any], tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base")
    assert_as_peft(tmp_path, write_adapter(tmp_path / "adapter", base, **config), base)


@each("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_multimodal_model(prefix: str, tmp_path: Path) -> None:
    """Its tensors, and the patterns of its ranks, have the names of the text model within the whole model."""
    base = write_llama(tmp_path / "base")
    module = "model.layers.1.self_attn.q_proj"
    expected = write_adapter(
        tmp_path / "adapter", base, target_modules=["q_proj", "down_proj"], rank_pattern={module: 5}
    )
    folder = tmp_path / "adapter"
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {
            name.replace("base_model.model.model.", f"base_model.model.{prefix}"): tensor
            for name, tensor in tensors.items()
        },
        folder / "adapter_model.safetensors",
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    config["rank_pattern"] = {prefix + module.removeprefix("model."): 5}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert_as_peft(tmp_path, expected, base)


@each("bias", ["none", "all", "lora_only"])
def test_biases_as_peft(bias: str, tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", attention_bias=True)
    adapter = write_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "o_proj"], bias=bias)
    assert_as_peft(tmp_path, adapter, base)


@each("tied", [False, True])
def test_tied_heads_stay_tied(tied: bool, tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", tie_word_embeddings=tied)
    assert_as_peft(tmp_path, write_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "down_proj"]), base)


@each("bias", ["none", "all"])
def test_gpt2_whose_matrices_are_transposed(bias: str, tmp_path: Path) -> None:
    """attention's c_proj is square, so its shape does not show the order."""
    base = write_gpt2(tmp_path / "base")
    modules = ["c_attn", "c_proj", "c_fc"]
    expected = write_adapter(tmp_path / "adapter", base, target_modules=modules, fan_in_fan_out=True, bias=bias)
    assert_as_peft(tmp_path, expected, base)


def test_gpt2_with_a_head_of_its_own(tmp_path: Path) -> None:
    """For convolutions and a linear layer, PEFT saves a single value of fan_in_fan_out."""
    base = write_gpt2(tmp_path / "base", tie_word_embeddings=False)
    expected = write_adapter(tmp_path / "adapter", base, target_modules=["c_attn", "c_proj", "wte", "lm_head"])
    assert_as_peft(tmp_path, expected, base)


def test_a_base_saved_without_its_head(tmp_path: Path) -> None:
    base = write_gpt2(tmp_path / "base")
    expected = write_adapter(tmp_path / "adapter", base, target_modules=["c_attn"], fan_in_fan_out=True)
    base.transformer.save_pretrained(tmp_path / "base")
    assert_as_peft(tmp_path, expected, base)


def test_other_tensors_are_untouched_and_dtypes_kept(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    file = tmp_path / "base" / "model.safetensors"
    before = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(before, file, {"format": "pt"})
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for merged in merge(tmp_path):
        for name, tensor in merged.read(merged.shapes):
            assert tensor.dtype == torch.bfloat16
            if "q_proj" not in name:
                assert torch.equal(tensor, before[name]), name
                continue
            a, b = (adapter[f"base_model.model.{name[:-7]}.lora_{x}.weight"].double() for x in "AB")
            # lora_alpha / r is 1. A float32 sum may be rounded to the other side in bfloat16, which has 8 bits.
            torch.testing.assert_close(tensor.double(), before[name].double() + b @ a, rtol=2**-8, atol=1e-6)


def write_changed(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor | None]) -> None:
    """Write an adapter of q_proj with other settings, and with tensors changed, added or (None) removed."""
    base = write_llama(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base, r=4, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    changed = load_file(weights) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, weights)


@pytest.mark.long
@each(
    "config, message",
    [
        ({"peft_type": "LOHA"}, r"adapter_config\.json: peft_type='LOHA' is not supported: only 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters=.* is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"bias": "some"}, "bias='some' is not supported: only 'none', 'all', 'lora_only'"),
        ({"r": 0}, "r=0 is not a number above 0"),
        ({"r": "4"}, "r='4' is not of type int"),
        ({"lora_alpha": math.inf}, "lora_alpha=inf is not a number from 1e-30"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern: q_proj=-1 is not a number above 0"),
        ({"rank_pattern": {"(a+)+b": 4}}, r"rank_pattern has '\(a\+\)\+b': only names and dots"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head' is not a list of names"),
        ({"r": 5}, r"q_proj\.lora_[AB]\.weight is \[.*4.*\], but the model and adapter_config\.json need \[.*5.*\]"),
    ],
)
def test_refused_settings(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_changed(tmp_path, config, {})
    with pytest.raises(UserError, match=message):
        merge(tmp_path)


OTHER = "base_model.model.model.layers.5.self_attn.q_proj"


@each(
    "tensors, message",
    [
        ({f"{QUERY}.lora_A.weight": None}, r"layers\.0\.self_attn\.q_proj\.lora_B\.weight is alone"),
        (
            {f"{QUERY}.lora_A.weight": torch.ones(4, 32)},
            r"q_proj\.lora_A\.weight is \[4, 32\], but the model and adapter_config\.json need \[4, 64\]",
        ),
        (
            {f"{QUERY}.lora_B.weight": torch.ones(32, 4)},
            r"q_proj\.lora_B\.weight is \[32, 4\], but the model and adapter_config\.json need \[64, 4\]",
        ),
        (
            {f"{OTHER}.lora_A.weight": torch.ones(4, 64)},
            r"layers\.5\.self_attn\.q_proj\.weight, which this model does not have",
        ),
        ({"base_model.model.model.norm.weight": torch.ones(64)}, r"norm\.weight is neither a factor"),
        ({f"{QUERY}.bias": torch.ones(64)}, r"q_proj\.bias is neither a factor"),
        ({f"{QUERY}.lora_magnitude_vector": torch.ones(64)}, r"lora_magnitude_vector is neither a factor"),
        ({f"{QUERY}.lora_A": torch.ones(4, 64)}, r"are both for model\.layers\.0\.self_attn\.q_proj\.weight"),
        (
            {"q_proj.lora_A.weight": torch.ones(4, 64)},
            r"adapter_model\.safetensors: q_proj\.lora_A\.weight is neither a factor",
        ),
        ({f"{QUERY}.base_layer.weight": torch.ones(3, 64)}, r"base_layer\.weight is \[3, 64\], but .* need \[64, 64\]"),
        (
            {f"base_model.model.model.norm.lora_{x}.weight": torch.ones(4, 4) for x in "AB"},
            r"adapts model\.norm, but LoRA on AddRMSNorm is not supported",
        ),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    write_changed(tmp_path, {}, tensors)
    with pytest.raises(UserError, match=message):
        merge(tmp_path)


@each(
    "config",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
)
def test_a_tied_head_cannot_change_apart(config: dict[str, Any], tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base", tie_word_embeddings=True)
    write_adapter(tmp_path / "adapter", base, **config)
    with pytest.raises(UserError, match=r"head and embedding are tied and cannot differ"):
        merge(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    write_changed(tmp_path, {}, {})
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is truncated"):
        merge(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match=r"adapter has no adapter_model\.safetensors: save the adapter as safetensors"):
        merge(tmp_path)
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"adapter has no adapter_config\.json: give the folder of a PEFT adapter"):
        merge(tmp_path)


def test_a_base_without_the_tensor(tmp_path: Path) -> None:
    write_changed(tmp_path, {}, {})
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(
        UserError, match=r"changes model\.layers\.0\.self_attn\.q_proj\.weight, which .*base does not hold"
    ):
        merge(tmp_path)


def test_a_quantised_base(tmp_path: Path) -> None:
    write_changed(tmp_path, {}, {})
    file = tmp_path / "base" / "model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"q_proj\.weight is torch\.int8: an adapter can be merged only into floats"):
        [list(merged.read(merged.shapes)) for merged in merge(tmp_path)]


def test_unknown_keys_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No key that PEFT itself writes is reported."""
    write_changed(tmp_path, {}, {})
    merge(tmp_path)
    assert not caplog.records
    write_changed(tmp_path, {"lora_temperature": 2}, {})
    merge(tmp_path)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["lora_temperature"]

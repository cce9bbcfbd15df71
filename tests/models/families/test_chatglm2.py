"""ChatGLM2's layout with GLM-4's fields compared with transformers' GLM, and refused values. ChatGLM2 and ChatGLM3:
test_goldens.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GlmConfig, GlmForCausalLM

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.config import ConfigReader
from models.families.chatglm import ChatGLM
from models.families.chatglm2 import ChatGLM2, read_config
from models.registry import find_architecture
from tests.helpers.builders import all_logits, complete, engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS

CONFIG = {
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 88,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "kv_channels": 24,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "original_rope": True,
    "padded_vocab_size": 96,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 96,
}


def reader(**changes: Any) -> ConfigReader:
    return ConfigReader(CONFIG | changes, "config.json")


def write_glm4(folder: Path, config: dict[str, Any]) -> GlmForCausalLM:
    """Write a random GLM of transformers in the layout of the model's own code."""
    torch.manual_seed(0)
    ratio = config["rope_ratio"]
    stretched = {"rope_type": "default", "rope_theta": 10000.0 * ratio}
    if "chatglm2" in config.get("_name_or_path", ""):
        stretched = {"rope_type": "linear", "rope_theta": 10000.0, "factor": ratio}
    reference = GlmForCausalLM(
        GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["multi_query_group_num"],
            head_dim=config["kv_channels"],
            rms_norm_eps=config["layernorm_epsilon"],
            attention_bias=config["add_qkv_bias"],
            rope_parameters={**stretched, "partial_rotary_factor": 0.5},
            pad_token_id=0,
            eos_token_id=95,
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    weights = reference.state_dict()
    tensors = {
        "transformer.embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": weights["model.norm.weight"],
        "transformer.output_layer.weight": weights["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(6),
    }
    for i in range(config["num_layers"]):
        theirs, ours = f"model.layers.{i}", f"transformer.encoder.layers.{i}"
        for kind in ("weight", "bias") if config["add_qkv_bias"] else ("weight",):
            parts = [weights[f"{theirs}.self_attn.{x}_proj.{kind}"] for x in "qkv"]
            tensors[f"{ours}.self_attention.query_key_value.{kind}"] = torch.cat(parts)
        for their, our in (
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            tensors[f"{ours}.{our}.weight"] = weights[f"{theirs}.{their}.weight"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return reference


@each(
    "changes",
    [
        {},
        {"multi_query_group_num": 4, "rope_ratio": 10000},
        {"multi_query_group_num": 1, "add_qkv_bias": False, "rope_ratio": 1},
        {"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 50},
    ],
    quick=[{}],
)
def test_equals_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = write_glm4(tmp_path, CONFIG | changes)
    engine = engine_of(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 95, (length,), generator=generator).tolist() for length in (5, 1, 40, 17)]
    expected_ids = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits = reference(ids).logits[0]
        # 1e-4: float32 sums in another order; the logits are of order 1 to 10
        torch.testing.assert_close(all_logits(engine, prompt), logits, atol=1e-4, rtol=0)
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, min_new_tokens=32, do_sample=False
        )
        expected_ids.append(output[0, len(prompt) :].tolist())
    decode = DecodeConfig(max_new_tokens=32, min_new_tokens=32, stop_token_ids=[95])
    assert [completion.token_ids for completion in complete(engine, prompts, decode)] == expected_ids


def test_one_model_type_is_two_architectures() -> None:
    for family, model in (("chatglm", ChatGLM), ("chatglm2", ChatGLM2), ("chatglm3", ChatGLM2)):
        config = ConfigReader(json.loads((GOLDENS / family / "config.json").read_text(encoding="utf-8")), "config.json")
        architecture = find_architecture(config)
        assert architecture.model_class is model
        architecture.read_config(config)
        assert config.unread() == []


def test_every_key_of_glm4_is_known() -> None:
    config = reader(attn_implementation="sdpa", classifier_dropout=None, pre_seq_len=None, quantization_bit=0)
    find_architecture(config).read_config(config)
    assert config.unread() == []


@each(
    "changes, message",
    [
        ({"add_bias_linear": True}, r"add_bias_linear=True is not supported: only False"),
        ({"apply_residual_connection_post_layernorm": True}, r"apply_residual_connection_post_layernorm=True"),
        ({"fp32_residual_connection": True}, r"fp32_residual_connection=True is not supported"),
        ({"interleaved_qkv": True}, r"interleaved_qkv=True is not supported"),
        ({"multi_query_attention": False}, r"multi_query_attention=False is not supported: only True"),
        ({"original_rope": False}, r"original_rope=False is not supported: only True"),
        ({"post_layer_norm": False}, r"post_layer_norm=False is not supported"),
        ({"rmsnorm": False}, r"rmsnorm=False is not supported"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings=True is not supported"),
        ({"pre_seq_len": 128}, r"pre_seq_len=128 is not supported"),
        ({"quantization_bit": 4}, r"quantization_bit=4 is not supported"),
        ({"multi_query_group_num": 3}, r"num_attention_heads=4 is not a multiple of multi_query_group_num=3"),
        ({"kv_channels": 18}, r"kv_channels=18 is not a multiple of 4"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers=3 is not supported: only None, 2"),
        ({"vocab_size": 95}, r"vocab_size=95 is not supported: only None, 96"),
        ({"rope_ratio": 0}, r"rope_ratio=0\.0 is not a number from 1e-30"),
        ({"padded_vocab_size": None}, r"padded_vocab_size is missing"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_config(reader(**changes))

"""Families that transformers lacks but one of its models computes: such a model, saved in the family's layout.

The families' code is modeling_internlm2.py of internlm/internlm2_5-7b, modeling_internlm3.py of
internlm/internlm3-8b-instruct and modeling_telechat2.py of Tele-AI/TeleChat2-7B.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, SeedOssForCausalLM

INTERNLM2_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".self_attn.": ".attention.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    "lm_head.": "output.",
}
TELECHAT_NAMES = {
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    ".self_attn.q_proj.": ".self_attention.query.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".self_attn.": ".self_attention.",
}
TELECHAT_KEYS = {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layer_norm_epsilon",
    "max_position_embeddings": "training_seqlen",
}


class InternLM2Twin(LlamaForCausalLM):
    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        heads = self.config.num_key_value_heads
        _rewrite_weights(folder, heads, ("q_proj", "k_proj", "v_proj"), "wqkv", INTERNLM2_NAMES)
        config = _read_config(folder)
        bias = config.pop("attention_bias")
        del config["mlp_bias"], config["head_dim"]
        _write_config(folder, config | {"model_type": "internlm2", "bias": bias})


class InternLM3Twin(SeedOssForCausalLM):
    """A model whose config has attention_out_bias equal to mlp_bias."""

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        config = _read_config(folder)
        del config["residual_dropout"], config["attention_out_bias"]
        biases = {"qkv_bias": config.pop("attention_bias"), "bias": config.pop("mlp_bias")}
        _write_config(folder, config | biases | {"model_type": "internlm3"})


class TeleChatTwin(LlamaForCausalLM):
    """A model whose config has attention_bias and mlp_bias. Only the biases that are added to the residual stream are
    not 0."""

    def save_pretrained(self, folder: Path) -> None:
        absent = re.compile(r"(q|k|v|gate|up)_proj\.bias$")
        for name, parameter in self.named_parameters():
            if absent.search(name):
                parameter.data.zero_()
        super().save_pretrained(folder)
        heads = self.config.num_key_value_heads
        _rewrite_weights(folder, heads, ("k_proj", "v_proj"), "key_value", TELECHAT_NAMES, absent)
        config = _read_config(folder)
        for key in ("attention_bias", "mlp_bias", "head_dim", "hidden_act", "rope_parameters"):
            del config[key]
        config = {TELECHAT_KEYS.get(key, key): value for key, value in config.items()}
        _write_config(folder, config | {"model_type": "telechat", "base_seqlen": config["training_seqlen"]})


def _rewrite_weights(
    folder: Path,
    num_keys: int,
    fused: tuple[str, ...],
    fused_name: str,
    names: dict[str, str],
    absent: re.Pattern[str] | None = None,
) -> None:
    """Fuse projections, so that the weights of a key head are contiguous, and rename all tensors."""
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not (absent and absent.search(name))}
    for first in [name for name in tensors if fused[0] in name]:
        parts = [tensors.pop(first.replace(fused[0], part_name)) for part_name in fused]
        by_key = torch.cat([part.unflatten(0, (num_keys, -1)) for part in parts], 1)
        tensors[first.replace(fused[0], fused_name)] = by_key.flatten(0, 1)
    save_file({_renamed(name, names): tensor for name, tensor in tensors.items()}, file)


def _renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _read_config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

"""Models on torch's meta device: shapes without data."""

import json
from typing import Any

import torch

from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.registry import find_architecture
from tests.helpers.catalog import GOLDENS


def build(config: dict[str, Any]) -> CausalLM:
    reader = ConfigReader(config, "config.json")
    architecture = find_architecture(reader)
    with torch.device("meta"):
        return architecture.build(architecture.read_config(reader))


def golden(family: str, **changes: Any) -> CausalLM:
    return build(json.loads((GOLDENS / family / "config.json").read_text()) | changes)


DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip

"""DeepSeek-V2 and -V3 of small sizes in all their variants, by transformers' own classes."""

from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.6}
V3_GROUPS = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "v2": (2, {}),
    "v2_no_q_lora": (2, {"q_lora_rank": None}),
    "v2_groups": (2, V2_GROUPS),
    "v2_two_groups": (2, V2_GROUPS | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}),
    "v2_all_experts": (2, {"first_k_dense_replace": 0, "num_experts_per_tok": 8, "n_shared_experts": 1}),
    "v2_biases_tied": (2, {"attention_bias": True, "tie_word_embeddings": True}),
    "v2_yarn": (2, {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "v2_yarn_mscale": (2, {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0}}),
    "v2_yarn_plain": (2, {"rope_parameters": YARN}),
    "v2_linear": (2, {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}}),
    "v3": (3, V3_GROUPS),
    "v3_no_q_lora": (3, V3_GROUPS | {"q_lora_rank": None}),
    "v3_one_group": (3, {"n_group": 1, "topk_group": 1}),
    "v3_two_groups": (3, {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}),
    "v3_not_normed": (3, V3_GROUPS | {"norm_topk_prob": False, "routed_scaling_factor": 0.7}),
    "v3_half_split": (3, V3_GROUPS | {"rope_interleave": False}),
    "v3_biases_tied": (3, V3_GROUPS | {"attention_bias": True, "tie_word_embeddings": True}),
    "v3_dense": (3, V3_GROUPS | {"first_k_dense_replace": 3}),
    "v3_yarn": (3, V3_GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
}


def build(version: int, **config: Any) -> PreTrainedModel:
    """transformers' model; every parameter is random, also biases and the routers' corrections."""
    torch.manual_seed(0)
    if version == 2:
        model: PreTrainedModel = DeepseekV2ForCausalLM(DeepseekV2Config(**{**SMALL, **config}))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**SMALL, **config}))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model.eval()

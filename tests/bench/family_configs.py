"""A config.json of 0.3 to 0.9 billion parameters for each family, with the vocabulary and heads of its published models."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.config import ConfigReader
from models.layers.linear import Linear
from models.layers.moe import Experts
from models.registry import find_architecture

LLAMA: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
GPTJ = {"n_embd": 1536, "n_head": 16, "n_layer": 12, "n_positions": 2048, "rotary_dim": 64, "vocab_size": 50400}
MIXTURE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "num_hidden_layers": 5}
GRANITE_MOE = {
    **{"num_hidden_layers": 12, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4},
    **{"attention_multiplier": 1 / 128, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
    **{"residual_multiplier": 0.22, "tie_word_embeddings": True, "vocab_size": 49155},
}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 5472,
    "moe_intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
}
GLM = {
    **LLAMA,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "vocab_size": 151552,
    "pad_token_id": 0,
    "num_hidden_layers": 12,
}
MAMBA2: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 12,
    "mamba_n_heads": 48,
    "mamba_d_state": 128,
    "tie_word_embeddings": True,
}
ROUTED = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 5,
}
HYBRID: dict[str, Any] = {  # heads of Qwen3.5-0.8B
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}
HYBRID_MIXTURE = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 8,
}
CHATGLM = {"model_type": "chatglm", "hidden_size": 1536, "num_attention_heads": 12, "num_layers": 14}
CHATGLM_IDS = {"bos_token_id": 130004, "mask_token_id": 130000, "gmask_token_id": 130001}

CONFIGS: dict[str, dict[str, Any]] = {  # by model_type; some configs set their own
    "llama": LLAMA,
    "qwen3_next": {**HYBRID, **HYBRID_MIXTURE, "vocab_size": 151936},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **HYBRID_MIXTURE},
    "llama4_text": {
        **LLAMA,
        "num_hidden_layers": 8,
        "intermediate_size": 1024,
        "intermediate_size_mlp": 2048,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
    },
    "lfm2_moe": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "moe_intermediate_size": 896,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
    },
    "lfm2": {
        "hidden_size": 1024,
        "block_ff_dim": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
    },
    "baichuan": {
        **{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
        "model_max_length": 4096,
        "vocab_size": 64000,
    },
    "bloom": {"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880},
    "chatglm": {**CHATGLM, **CHATGLM_IDS, "inner_hidden_size": 6144, "vocab_size": 130528},
    "chatglm2": {
        **CHATGLM,
        "ffn_hidden_size": 4096,
        "kv_channels": 128,
        "multi_query_group_num": 2,
        "padded_vocab_size": 65024,
        "seq_length": 8192,
        "add_qkv_bias": True,
    },
    "cohere2": {**LLAMA, "num_hidden_layers": 12, "sliding_window": 4096, "vocab_size": 256000},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 512, "n_group": 4, "topk_group": 2},
    "ernie3_5": {
        **{key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")},
        "layer_norm_eps": 1e-5,
    },
    "ernie4_5": {**LLAMA, "head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 103424},
    "ernie4_5_moe": {
        **LLAMA,
        "head_dim": 128,
        "moe_num_experts": 16,
        "moe_k": 4,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 5,
        "vocab_size": 103424,
    },
    "exaone4": {**LLAMA, "sliding_window": 4096, "vocab_size": 102400},
    "exaone_moe": {
        **{**LLAMA, **MIXTURE, "head_dim": 128, "vocab_size": 153600, "sliding_window": 128},
        **{"num_shared_experts": 1, "routed_scaling_factor": 2.5},
    },
    "falcon": {"hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 24, "vocab_size": 65024},
    "afmoe": {
        **{**LLAMA, "head_dim": 128, "num_hidden_layers": 5, "vocab_size": 200192, "mup_enabled": True},
        **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "num_shared_experts": 1},
    },
    "apertus": {**LLAMA, "hidden_act": "xielu", "num_hidden_layers": 12, "rope_scaling": LLAMA3, "vocab_size": 131072},
    "arcee": {**LLAMA, "vocab_size": 128004},
    "bitnet": {**LLAMA, "num_hidden_layers": 12, "vocab_size": 128256},
    "codegen": {**GPTJ, "vocab_size": 51200},
    "cohere": {**LLAMA, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "vocab_size": 128000},
    "cwm": {**LLAMA, "head_dim": 128, "sliding_window": 8192, "rope_scaling": LLAMA3, "vocab_size": 128256},
    "dots1": {
        **{**LLAMA, "num_hidden_layers": 5, "head_dim": 128, "vocab_size": 152064, "sliding_window": None},
        **{"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 704},
    },
    "gemma": {**LLAMA, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 256000},
    "gpt_bigcode": {"n_embd": 1536, "n_head": 12, "n_layer": 16, "n_positions": 8192, "vocab_size": 49152},
    "gpt_neo": {
        **{"hidden_size": 1536, "num_heads": 12, "num_layers": 12, "attention_types": [[["global", "local"], 6]]},
        "vocab_size": 50257,
    },
    "gptj": GPTJ,
    "gpt_oss": {
        **{**LLAMA, "head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 4},
        **{"intermediate_size": 768, "num_local_experts": 16, "num_experts_per_tok": 4, "vocab_size": 100352},
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    },
    "granitemoe": {**LLAMA, **GRANITE_MOE},
    "granitemoeshared": {**LLAMA, **GRANITE_MOE, "shared_intermediate_size": 1024},
    "mpt": {"d_model": 1536, "n_heads": 12, "n_layers": 16, "vocab_size": 50432},
    "phimoe": {**LLAMA, "num_hidden_layers": 5, "intermediate_size": 768, "vocab_size": 32064},
    "olmoe": {**LLAMA, "num_hidden_layers": 8, "intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4},
    "solar_open": {**LLAMA, **ROUTED, "num_hidden_layers": 3, "head_dim": 128, "vocab_size": 196608},
    "stablelm": {**LLAMA, "layer_norm_eps": 1e-5, "use_qkv_bias": True, "vocab_size": 100352},
    "helium": {**LLAMA, "head_dim": 128, "vocab_size": 48000},
    "jais2": {**LLAMA, "layer_norm_eps": 1e-5, "vocab_size": 150272},
    "nanochat": {**LLAMA, "intermediate_size": 6144, "num_key_value_heads": 12, "vocab_size": 65536},
    "nemotron": {**LLAMA, "num_hidden_layers": 4, "norm_eps": 1e-5, "vocab_size": 256000},
    "olmo": {**LLAMA, "vocab_size": 50304},
    "falcon_h1": {
        **LLAMA,
        **{"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8},
        **{"num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 128},
        "vocab_size": 32784,
    },
    "gemma2": {
        **LLAMA,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 13,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 256000,
    },
    "gemma3_text": {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 13,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gemma3n_text": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 15, "num_attention_heads": 8},
        **{"num_key_value_heads": 2, "head_dim": 256, "vocab_size": 262400, "num_kv_shared_layers": 5},
        **{"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 262144},
    },
    "gemma4_text": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 15, "num_attention_heads": 8},
        **{"num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144},
        **{"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 6},
        **{"use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    },
    "gemma4_unified_text": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8},
        **{"num_key_value_heads": 4, "head_dim": 128, "global_head_dim": 256, "attention_k_eq_v": True},
        **{"num_global_key_value_heads": 1, "vocab_size": 262144, "final_logit_softcapping": 30.0},
    },
    "glm": GLM,
    "glm4": GLM,
    "glm4_moe": {**GLM, **ROUTED, "attention_bias": True, "first_k_dense_replace": 1},
    "glm4_moe_lite": {
        **DEEPSEEK,
        **ROUTED,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "vocab_size": 154880,
    },
    "gpt2": {"n_embd": 1280, "n_layer": 24, "n_head": 20, "vocab_size": 50257},
    "gpt_neox": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50304,
    },
    "granite": {
        **LLAMA,
        "attention_multiplier": 1 / 128,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": [*["mamba"] * 5, "attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 4096,
        "attention_multiplier": 1 / 128,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "residual_multiplier": 0.22,
        "vocab_size": 100352,
    },
    "mamba2": {
        **{"hidden_size": 1536, "num_hidden_layers": 24, "num_heads": 48, "head_dim": 64, "n_groups": 1},
        **{"state_size": 128, "vocab_size": 50288, "tie_word_embeddings": True},
    },
    "nemotron_h": {
        **{key: value for key, value in LLAMA.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
        **{"hybrid_override_pattern": "M-M-M*-M-M-M*-M-", "head_dim": 128, "mamba_num_heads": 48, "vocab_size": 131072},
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [5, 11], "vocab_size": 128256},
    "hunyuan_v1_dense": {**LLAMA, "head_dim": 128, "vocab_size": 128512, "tie_word_embeddings": True},
    "hunyuan_v1_moe": {
        **{**LLAMA, "head_dim": 128, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 128512},
        **{"num_experts": 16, "moe_topk": 8, "tie_word_embeddings": True},
    },
    "hyperclovax": {**LLAMA, "embedding_multiplier": 10.0, "logits_scaling": 0.125, "vocab_size": 110592},
    "internlm2": {**LLAMA, "bias": False, "vocab_size": 92544},
    "internlm3": {**LLAMA, "head_dim": 128, "num_key_value_heads": 2, "vocab_size": 128512},
    "kimi_k2": {**DEEPSEEK, **ROUTED, "q_lora_rank": 512, "routed_scaling_factor": 2.827, "vocab_size": 163840},
    "kimi_linear": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 128,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "model_max_length": 4096,
        "vocab_size": 163840,
    },
    "minicpm3": {
        **{"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 24},
        **{
            "q_lora_rank": 512,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "vocab_size": 73448,
        },
    },
    "minimax_m2": {
        **LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 768,
        "num_hidden_layers": 5,
        "head_dim": 128,
        "rotary_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": 200064,
    },
    "ministral": {**LLAMA, "head_dim": 128, "sliding_window": 4096, "vocab_size": 131072},
    "ministral3": {
        **LLAMA,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        },
        "tie_word_embeddings": True,
        "vocab_size": 131072,
    },
    "mistral": {**LLAMA, "sliding_window": 4096},
    "mistral4": {
        **{**DEEPSEEK, **ROUTED, "q_lora_rank": 512, "first_k_dense_replace": 0, "vocab_size": 131072},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    },
    "mixtral": {
        **LLAMA,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
    },
    "olmo2": {**LLAMA, "num_key_value_heads": 12, "vocab_size": 100352},
    "olmo3": {**LLAMA, "num_key_value_heads": 12, "sliding_window": 4096, "vocab_size": 100278},
    "opt": {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50272,
        "word_embed_proj_dim": 1024,
    },
    "phi": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 16,
        "num_attention_heads": 24,
        "vocab_size": 51200,
    },
    "phi3": {**LLAMA, "vocab_size": 32064, "pad_token_id": 0},
    "qwen": {
        "hidden_size": 1536,
        "intermediate_size": 8192,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "kv_channels": 128,
        "vocab_size": 151936,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-6,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 2048,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
    },
    "qwen2": {**LLAMA, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen2_moe": {**LLAMA, **MIXTURE, "shared_expert_intermediate_size": 2048, "vocab_size": 151936},
    "qwen3": {**LLAMA, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3_moe": {**LLAMA, **MIXTURE, "head_dim": 128, "vocab_size": 151936},
    "seed_oss": {**LLAMA, "head_dim": 128, "num_hidden_layers": 12, "vocab_size": 155136},
    "smollm3": {**LLAMA, "rope_theta": 5e6, "vocab_size": 128256},
    "starcoder2": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "sliding_window": 4096,
        "vocab_size": 49152,
    },
    "telechat": {
        "hidden_size": 1536,
        "ffn_hidden_size": 4096,
        "n_layer": 12,
        "n_head": 12,
        "base_seqlen": 8192,
        "training_seqlen": 8192,
        "vocab_size": 131072,
    },
}


def write_configs(folder: Path) -> list[Path]:
    """Write each family's config.json into a folder of its name. Returns these folders."""
    folders = []
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": name, **config}))
        folders.append(folder / name)
    return folders


def chatglm_prompt(num_tokens: int) -> list[int]:
    """Return the ids of a prompt that ChatGLM-6B accepts: text, [gMASK], <sop>."""
    text = [1000 + 31 * i % 9973 for i in range(num_tokens - 2)]
    return [*text, CHATGLM_IDS["gmask_token_id"], CHATGLM_IDS["bos_token_id"]]


def operations_per_token(folder: Path, num_tokens: int) -> float:
    """Return the average number of operations per token of such a prompt.

    The sum contains the products of all layers (of a mixture only the chosen experts), attention to the token itself
    and the tokens before it, and the token's share of the head's product, which only the last token computes.
    """
    reader = ConfigReader.from_folder(folder)
    architecture = find_architecture(reader)
    with torch.device("meta"):
        model = architecture.build(architecture.read_config(reader))
    layers, vocabulary = model.get_submodule(model.layout.layers), model.get_submodule(model.layout.head)
    mixtures = [module for module in layers.modules() if isinstance(module, Experts)]
    products = _num_weights(layers) - sum(_num_weights(mixture) * (1 - mixture.active_share(1)) for mixture in mixtures)
    channels = sum(
        # a latent is both key and value
        heads.num_attention_heads * (heads.head_dim + (heads.value_head_dim or heads.head_dim))
        for heads in model.attention_heads
    )
    return 2 * (products + channels * (num_tokens + 1) / 2 + _num_weights(vocabulary) / num_tokens)


def _num_weights(module: nn.Module) -> int:
    return sum(math.prod(layer.shape) for layer in module.modules() if isinstance(layer, Linear))

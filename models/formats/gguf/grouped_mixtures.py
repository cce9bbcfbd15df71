"""Mixtures with DeepSeek-V3's correction of routing scores, and without latent attention.

Key names are from gguf's constants.py, and what files do not say is from llama.cpp's code of the architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.formats.gguf.decoder_config import SIGMOID, WINDOW, decoder_shape, has_bias, layer_types, rotary_decoder
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.names import ATTENTION, DEEPSEEK, HEAD_NORMS, LLAMA, TensorLayout
from models.formats.gguf.rotary import partial_rotary_factor, rope_scaling, rotary_channels

DOTS1 = replace(DEEPSEEK, in_layer={**DEEPSEEK.in_layer, **ATTENTION, **HEAD_NORMS})
GLM4_MOE = replace(DOTS1, in_layer={**DOTS1.in_layer, "post_attention_norm": "post_attention_layernorm"})
ERNIE_MOE = replace(DOTS1, in_layer={**DOTS1.in_layer, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"})
EXAONE_MOE = replace(DOTS1, in_layer={**DOTS1.in_layer, "exp_probs_b.bias": "mlp.e_score_correction_bias"})
AFMOE = replace(
    DOTS1,
    in_layer={
        **DOTS1.in_layer,
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_gate_inp": "mlp.router.gate",
        "exp_probs_b.bias": "mlp.expert_bias",
    },
)
MINIMAX_M2 = replace(
    LLAMA,
    in_layer={**LLAMA.in_layer, **HEAD_NORMS, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
)


def _experts(file: GGUFMetadata) -> dict[str, Any]:
    read = file.read
    read.expect("expert_gating_func", (SIGMOID,), None)
    for key in ("expert_group_count", "expert_group_used_count"):
        read.expect(key, (None, 0, 1), None)
    return {
        "n_routed_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "n_shared_experts": read.count("expert_shared_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "first_k_dense_replace": read.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": read.get("expert_weights_scale", float, 0.0) or 1.0,
        "norm_topk_prob": read.get("expert_weights_norm", bool, False),
    }


def _glm4_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of GLM-4.5. The file counts the layers for multi-token prediction as layers of the model."""
    shape, num_nextn = decoder_shape(file), file.read.get("nextn_predict_layers", int, 0)
    channels = rotary_channels(file, shape["head_dim"])
    shape["num_hidden_layers"] -= num_nextn
    return shape | {
        "model_type": "glm4_moe",
        "attention_bias": has_bias(file, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "num_nextn_predict_layers": num_nextn,
        "partial_rotary_factor": partial_rotary_factor(channels, shape["head_dim"]),
        "rope_scaling": rope_scaling(file, channels),
        **_experts(file),
    }


def _dots1(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of dots.llm1. No layer of the published model has a window."""
    return rotary_decoder(file) | {"model_type": "dots1", "sliding_window": None} | _experts(file)


def _ernie_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Ernie 4.5 with mixtures. llama.cpp takes softmax probabilities and normalises the weights."""
    read = file.read
    read.raw("expert_shared_feed_forward_length")  # the converter divides by the key heads, which fits some models only
    return rotary_decoder(file) | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": read.count("expert_count"),
        "moe_k": read.count("expert_used_count"),
        "moe_num_shared_experts": read.get("expert_shared_count", int, 0),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "moe_layer_start_index": read.get("leading_dense_block_count", int, 0),
        "moe_layer_interval": read.count("interleave_moe_layer_step", 1),
    }


def _afmoe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Arcee Trinity. llama.cpp multiplies embeddings, and every fourth layer has no window."""
    read = file.read
    read.expect("expert_gating_func", (SIGMOID,), None)
    read.expect("expert_weights_norm", (True,), None)
    return rotary_decoder(file) | {
        "model_type": "afmoe",
        "attention_bias": has_bias(file, "attn_q"),
        "mup_enabled": True,
        "sliding_window": read.count("attention.sliding_window"),
        "global_attn_every_n_layers": 4,
        "num_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "num_shared_experts": read.count("expert_shared_count"),
        "num_dense_layers": read.get("leading_dense_block_count", int, 0),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "route_scale": read.positive("expert_weights_scale", 1.0),
    }


def _exaone_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of K-EXAONE. Its layers for multi-token prediction are the file's last ones, and are not used."""
    shape, read = rotary_decoder(file), file.read
    shape["num_hidden_layers"] -= read.get("nextn_predict_layers", int, 0)
    read.expect("expert_gating_func", (SIGMOID,), None)
    inner_size, num_shared = read.count("expert_feed_forward_length"), read.count("expert_shared_count")
    read.expect("expert_shared_feed_forward_length", (num_shared * inner_size, None), None)
    return shape | {
        "model_type": "exaone_moe",
        "sliding_window": read.count(WINDOW, 128),
        "sliding_window_pattern": 4,
        "layer_types": layer_types(file, "exaone-moe", shape["num_hidden_layers"]),
        "num_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "num_shared_experts": num_shared,
        "moe_intermediate_size": inner_size,
        "first_k_dense_replace": read.get("leading_dense_block_count", int, 0),
        "n_group": read.count("expert_group_count", 1),
        "topk_group": read.count("expert_group_used_count", 1),
        "routed_scaling_factor": read.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": read.get("expert_weights_norm", bool, False),
    }


def _minimax_m2(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of MiniMax-M2. llama.cpp normalises the weights of a token's experts."""
    shape, read = decoder_shape(file), file.read
    channels, inner_size = rotary_channels(file, shape["head_dim"]), shape["intermediate_size"]
    read.expect("expert_gating_func", (SIGMOID,), None)
    read.expect("expert_feed_forward_length", (inner_size,), inner_size)
    read.expect("expert_weights_norm", (True, None), None)
    read.expect("expert_weights_scale", (None, 0.0, 1.0), None)
    return shape | {
        "model_type": "minimax_m2",
        "num_local_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "rotary_dim": channels,
        "rope_scaling": rope_scaling(file, channels),
    }


CONFIGS: dict[str, Callable[[GGUFMetadata], dict[str, Any]]] = {
    "glm4moe": _glm4_moe,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie_moe,
    "afmoe": _afmoe,
    "exaone-moe": _exaone_moe,
    "minimax-m2": _minimax_m2,
}
"""The function that returns the config's keys, by llama.cpp's architecture name."""
LAYOUTS: dict[str, TensorLayout] = {
    "glm4_moe": GLM4_MOE,
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE_MOE,
    "afmoe": AFMOE,
    "exaone_moe": EXAONE_MOE,
    "minimax_m2": MINIMAX_M2,
}
"""By model_type."""

"""Architectures that differ from Llama in norms, biases, windows, rotation or experts: config keys and tensor names.

Key names are from gguf's constants.py, and what files do not say is from llama.cpp's code of the architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.formats.gguf.decoder_config import (
    TEMPERATURE,
    WINDOW,
    WINDOW_PATTERN,
    decoder_shape,
    has_bias,
    layer_types,
    rotary_decoder,
)
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.names import (
    ATTENTION,
    GATED_MLP,
    HEAD_NORMS,
    LLAMA,
    MLP,
    OUTSIDE_LAYERS,
    PRE_NORMS,
    QWEN3,
    TensorLayout,
)
from models.formats.gguf.rotary import rope_scaling

LLAMA4_CHUNK = 8192

NORMS_AFTER = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **{**ATTENTION, **HEAD_NORMS, **MLP},
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
SEED_OSS = TensorLayout(
    OUTSIDE_LAYERS,
    {"attn_norm": "input_layernorm", **ATTENTION, "post_attention_norm": "post_attention_layernorm", **MLP},
)
HUNYUAN = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **{**PRE_NORMS, **ATTENTION, **MLP},
        **{f"attn_{part[0]}_norm": f"self_attn.{part}_layernorm" for part in ("query", "key")},
        "ffn_gate_inp": "mlp.gate.wg",
        **{f"{name}_shexp": f"mlp.shared_mlp.{hf_name}" for name, hf_name in GATED_MLP.items()},
    },
    in_expert=GATED_MLP,
)
QWEN2_MOE = replace(
    QWEN3,
    in_layer={
        **QWEN3.in_layer,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"{name}_shexp": f"mlp.shared_expert.{hf_name}" for name, hf_name in GATED_MLP.items()},
    },
)
LLAMA4 = TensorLayout(
    OUTSIDE_LAYERS,
    {
        **{**PRE_NORMS, **ATTENTION},
        **{name: f"feed_forward.{hf_name}" for name, hf_name in GATED_MLP.items()},
        "ffn_gate_inp": "feed_forward.router",
        **{f"{name}_shexp": f"feed_forward.shared_expert.{hf_name}" for name, hf_name in GATED_MLP.items()},
    },
    in_expert=GATED_MLP,
    experts="feed_forward.experts",
)
ARCEE = replace(
    LLAMA, in_layer={**PRE_NORMS, **ATTENTION, **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("up", "down")}}
)
BITNET = replace(
    LLAMA,
    in_layer={
        **{**PRE_NORMS, **ATTENTION, **MLP},
        **{"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    },
)


def _biases(file: GGUFMetadata, inner: str = "ffn_gate") -> dict[str, bool]:
    return {"attention_bias": has_bias(file, "attn_q"), "mlp_bias": has_bias(file, inner)}


def _arcee(file: GGUFMetadata) -> dict[str, Any]:
    return rotary_decoder(file) | {"model_type": "arcee"} | _biases(file, "ffn_up")


def _bitnet(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of BitNet b1.58. llama.cpp has the first models, whose gate is silu."""
    biases = {"attention_bias": has_bias(file, "attn_q")}
    return rotary_decoder(file) | {"model_type": "bitnet", "hidden_act": "silu"} | biases


def _smollm3(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of SmolLM3. llama.cpp rotates no query and key in every fourth layer."""
    return rotary_decoder(file) | {"model_type": "smollm3", "no_rope_layer_interval": 4} | _biases(file)


def _seed_oss(file: GGUFMetadata) -> dict[str, Any]:
    biases = {**_biases(file), "attention_out_bias": has_bias(file, "attn_output")}
    return rotary_decoder(file) | {"model_type": "seed_oss"} | biases


def _ernie(file: GGUFMetadata) -> dict[str, Any]:
    return rotary_decoder(file) | {"model_type": "ernie4_5", "use_bias": has_bias(file, "attn_q")}


def _olmoe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of OLMoE. llama.cpp neither clips nor normalises the weights of a token's experts."""
    return rotary_decoder(file) | {
        "model_type": "olmoe",
        "attention_bias": has_bias(file, "attn_q"),
        "num_experts": file.read.count("expert_count"),
        "num_experts_per_tok": file.read.count("expert_used_count"),
        "norm_topk_prob": False,
    }


def _qwen2_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Qwen2-MoE. llama.cpp does not normalise the weights of a token's experts."""
    shape, read = rotary_decoder(file), file.read
    per_token = read.count("expert_used_count")
    return shape | {
        "model_type": "qwen2_moe",
        "qkv_bias": has_bias(file, "attn_q"),
        "num_experts": read.count("expert_count"),
        "num_experts_per_tok": per_token,
        # the first files have neither size
        "moe_intermediate_size": read.count("expert_feed_forward_length", shape["intermediate_size"] // per_token),
        "shared_expert_intermediate_size": read.count("expert_shared_feed_forward_length", shape["intermediate_size"]),
        "norm_topk_prob": False,
    }


def _gemma(file: GGUFMetadata) -> dict[str, Any]:
    return rotary_decoder(file) | {"model_type": "gemma", "attention_bias": has_bias(file, "attn_q")}


def _exaone4(file: GGUFMetadata) -> dict[str, Any]:
    shape = rotary_decoder(file)
    types = layer_types(file, "exaone4", shape["num_hidden_layers"])
    if file.read.raw(WINDOW) is None:
        return shape | {"model_type": "exaone4", "sliding_window": None}
    windows = {"sliding_window": file.read.count(WINDOW), "layer_types": types}
    return shape | {"model_type": "exaone4", "sliding_window_pattern": 4} | windows


def _olmo2(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of OLMo 2, or of OLMo 3, which has windows."""
    shape = rotary_decoder(file)
    types = layer_types(file, "olmo2", shape["num_hidden_layers"])
    shape |= {"attention_bias": has_bias(file, "attn_q")}
    if file.read.raw(WINDOW) is None:
        return shape | {"model_type": "olmo2"}
    return shape | {"model_type": "olmo3", "sliding_window": file.read.count(WINDOW), "layer_types": types}


def _hunyuan_dense(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Hunyuan. The converter has multiplied the base of its rotary frequencies."""
    file.read.raw("rope.scaling.original_context_length")  # a copy of the context length
    return rotary_decoder(file) | {"model_type": "hunyuan_v1_dense", "attention_bias": has_bias(file, "attn_q")}


def _hunyuan_moe(file: GGUFMetadata) -> dict[str, Any]:
    shape, read = _hunyuan_dense(file), file.read
    inner_size = shape["intermediate_size"]
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        read.expect(key, (inner_size,), inner_size)
    read.expect("expert_shared_count", (1,), 1)
    experts = {"num_experts": read.count("expert_count"), "moe_topk": read.count("expert_used_count")}
    return shape | {"model_type": "hunyuan_v1_moe"} | experts


def _llama4(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Llama 4. Its chunks, its query factors and its layers without rotation are llama.cpp's.

    As in llama.cpp, models with 128 experts (Maverick) have no norms of heads.
    """
    shape, read = rotary_decoder(file), file.read
    read.expect(WINDOW, (None, LLAMA4_CHUNK), None)
    read.expect(WINDOW_PATTERN, (None, 4), None)
    num_experts = read.count("expert_count")
    return shape | {
        "model_type": "llama4_text",
        "attention_bias": has_bias(file, "attn_q"),
        "attention_chunk_size": LLAMA4_CHUNK,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "no_rope_layer_interval": 4,
        "use_qk_norm": num_experts != 128,
        "interleave_moe_layer_step": read.count("interleave_moe_layer_step"),
        "intermediate_size_mlp": shape["intermediate_size"],
        "intermediate_size": read.count("expert_feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": read.count("expert_used_count"),
    }


def ministral3(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Ministral 3, whose queries grow with their position."""
    shape, read = decoder_shape(file), file.read
    read.expect("rope.dimension_count", (shape["head_dim"],), shape["head_dim"])
    read.expect("rope.scaling.type", ("yarn",), "yarn")
    rotary = rope_scaling(file, shape["head_dim"]) or {}
    rotary |= {
        "rope_theta": shape.pop("rope_theta"),
        "mscale": 1.0,
        "mscale_all_dim": read.get("rope.scaling.yarn_log_multiplier", float, 0.0),
        "llama_4_scaling_beta": read.positive(TEMPERATURE),
    }
    return shape | {"model_type": "ministral3", "rope_parameters": rotary}


CONFIGS: dict[str, Callable[[GGUFMetadata], dict[str, Any]]] = {
    "arcee": _arcee,
    "llama4": _llama4,
    "bitnet": _bitnet,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2_moe,
    "gemma": _gemma,
    "ernie4_5": _ernie,
    "hunyuan-dense": _hunyuan_dense,
    "hunyuan-moe": _hunyuan_moe,
}
"""The function that returns the config's keys, by llama.cpp's architecture name."""
LAYOUTS = {
    "arcee": ARCEE,
    "llama4_text": LLAMA4,
    "bitnet": BITNET,
    "smollm3": LLAMA,
    "ministral3": LLAMA,
    "ernie4_5": LLAMA,
    "olmoe": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "gemma": replace(LLAMA, norm_offset=1.0),
    "seed_oss": SEED_OSS,
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), NORMS_AFTER),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), HUNYUAN),
}
"""By model_type."""

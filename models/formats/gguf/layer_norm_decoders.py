"""Architectures with rotation and LayerNorms: config keys and tensor names.

Key names are from gguf's constants.py, and what files do not say is from llama.cpp's code of the architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from models.formats.gguf.decoder_config import decoder_shape, has_bias
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.names import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA,
    LONG_FACTORS,
    MLP,
    OUTSIDE_LAYERS,
    PRE_NORMS,
    SHORT_FACTORS,
    TensorLayout,
)
from models.formats.gguf.rotary import longrope, partial_rotary_factor, rope_scaling, rotary_channels

EPSILON = "attention.layer_norm_epsilon"

STARCODER2 = TensorLayout(OUTSIDE_LAYERS, {**PRE_NORMS, **ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
NEMOTRON = TensorLayout(
    OUTSIDE_LAYERS,
    {**PRE_NORMS, **ATTENTION, **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("up", "down")}},
    norm_offset=1.0,
    plain_norms=(".bias",),
)
STABLELM = replace(LLAMA, in_head={f"attn_{part}_norm": f"self_attn.{part}_layernorm.norms" for part in "qk"})
JAIS2 = replace(NEMOTRON, norm_offset=0.0)
COHERE = replace(LLAMA, in_layer={"attn_norm": "input_layernorm", **ATTENTION, **HEAD_NORMS, **MLP})
PHI2 = TensorLayout(
    {**OUTSIDE_LAYERS, "output_norm": "model.final_layernorm"},
    {
        **{"attn_norm": "input_layernorm", **ATTENTION, "attn_output": "self_attn.dense"},
        **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    },
)
GPT_NEOX = TensorLayout(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    {
        **PRE_NORMS,
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layers="gpt_neox.layers",
    settings=(),
)


def _shape(file: GGUFMetadata, epsilon: str) -> dict[str, Any]:
    """Return the keys of a decoder that rotates the first channels of a head. `epsilon`: the key of its norms' epsilon."""
    shape = decoder_shape(file, epsilon=EPSILON)
    channels = rotary_channels(file, shape["head_dim"])
    return shape | {
        epsilon: shape.pop("rms_norm_eps"),
        "partial_rotary_factor": partial_rotary_factor(channels, shape["head_dim"]),
        "rope_scaling": rope_scaling(file, channels),
    }


def _rotating_whole(file: GGUFMetadata, epsilon: str) -> dict[str, Any]:
    """Return the keys of `_shape` for a family that rotates all channels of a head. Raises UserError for a part of them."""
    shape = _shape(file, epsilon)
    file.read.expect("rope.dimension_count", (shape["head_dim"], None), None)
    return {key: value for key, value in shape.items() if key != "partial_rotary_factor"}


def _starcoder2(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of StarCoder 2. Its files have no window: llama.cpp attends to all tokens."""
    return _rotating_whole(file, "norm_epsilon") | {
        "model_type": "starcoder2",
        "use_bias": has_bias(file, "attn_q"),
        "sliding_window": None,
    }


def _biases(file: GGUFMetadata) -> dict[str, bool]:
    return {"attention_bias": has_bias(file, "attn_q"), "mlp_bias": has_bias(file, "ffn_up")}


def _nemotron(file: GGUFMetadata) -> dict[str, Any]:
    return _shape(file, "norm_eps") | {"model_type": "nemotron"} | _biases(file)


def _jais2(file: GGUFMetadata) -> dict[str, Any]:
    return _rotating_whole(file, "layer_norm_eps") | {"model_type": "jais2"} | _biases(file)


def _stablelm(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of StableLM. As in llama.cpp, a layer with one norm is parallel, whatever the file's key says."""
    file.read.raw("use_parallel_residual")  # the converter writes true for the first models, whose config lacks it
    return _shape(file, "layer_norm_eps") | {
        "model_type": "stablelm",
        "use_qkv_bias": has_bias(file, "attn_q"),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
    }


def _cohere(file: GGUFMetadata) -> dict[str, Any]:
    return _rotating_whole(file, "layer_norm_eps") | {
        "model_type": "cohere",
        "attention_bias": has_bias(file, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "logit_scale": file.read.positive("logit_scale"),
    }


def _cohere2(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Cohere 2. In llama.cpp every fourth layer has full attention."""
    return _rotating_whole(file, "layer_norm_eps") | {
        "model_type": "cohere2",
        "attention_bias": has_bias(file, "attn_q"),
        "sliding_window": file.read.count("attention.sliding_window"),
        "sliding_window_pattern": 4,
        "logit_scale": file.read.positive("logit_scale"),
    }


def _olmo(file: GGUFMetadata) -> dict[str, Any]:
    clip = file.read.get("attention.clamp_kqv", float, 0.0) or None
    shape = {key: value for key, value in _rotating_whole(file, EPSILON).items() if key != EPSILON}
    return shape | {"model_type": "olmo", "attention_bias": has_bias(file, "attn_q"), "clip_qkv": clip}


def _phi2(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Phi-2. The converter writes four times the hidden size as the inner size."""
    shape, inner = _shape(file, "layer_norm_eps"), file.tensors.get("blk.0.ffn_up.weight")
    return shape | {"model_type": "phi", "intermediate_size": inner.shape[0] if inner else shape["intermediate_size"]}


def _phimoe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Phi-3.5-MoE. A file has one factor of cos and sin for short and long texts.

    llama.cpp computes RMSNorms and softmax weights. The keys mean the model's own LayerNorms and SparseMixer.
    """
    shape, read = decoder_shape(file), file.read
    read.expect("rope.dimension_count", (shape["head_dim"],), shape["head_dim"])
    read.expect("rope.scaling.type", ("none", "longrope", None), None)
    original = read.count("rope.scaling.original_context_length", shape["max_position_embeddings"])
    scaling, window = longrope(file), read.get("attention.sliding_window", int, 0)
    if scaling:
        factor = scaling.pop("attention_factor")
        scaling |= {"short_mscale": factor, "long_mscale": factor, "original_max_position_embeddings": original}
    return shape | {
        "model_type": "phimoe",
        "attention_bias": has_bias(file, "attn_q"),
        "lm_head_bias": "output.bias" in file.tensors,
        "num_local_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "sliding_window": read.count("attention.sliding_window") if window else None,
        "rope_scaling": scaling,
    }


def _gpt_neox(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of GPT-NeoX. The converter writes no base of the rotary frequencies."""
    shape = _shape(file, "layer_norm_eps")
    heads = shape.pop("num_key_value_heads")
    file.read.expect("attention.head_count_kv", (heads, None), None)
    return shape | {
        "model_type": "gpt_neox",
        "rotary_pct": shape.pop("partial_rotary_factor"),
        "rotary_emb_base": shape.pop("rope_theta"),
        "attention_bias": has_bias(file, "attn_qkv"),
        "use_parallel_residual": file.read.get("use_parallel_residual", bool, True),
    }


CONFIGS: dict[str, Callable[[GGUFMetadata], dict[str, Any]]] = {
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "jais2": _jais2,
    "stablelm": _stablelm,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "olmo": _olmo,
    "phi2": _phi2,
    "phimoe": _phimoe,
    "gptneox": _gpt_neox,
}
"""The function that returns the config's keys, by llama.cpp's architecture name."""
LAYOUTS = {
    "starcoder2": STARCODER2,
    "nemotron": NEMOTRON,
    "jais2": JAIS2,
    "cohere": COHERE,
    "cohere2": COHERE,
    "stablelm": STABLELM,
    "olmo": LLAMA,
    "phi": PHI2,
    "phimoe": replace(LLAMA, settings=(SHORT_FACTORS, LONG_FACTORS)),
    "gpt_neox": GPT_NEOX,
}
"""By model_type."""

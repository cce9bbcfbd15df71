"""Architectures with multi-head latent attention: config keys and tensor names.

Key names are from gguf's constants.py, and what files do not say is from llama.cpp's code of the architecture.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conf.errors import UserError
from models.formats.gguf.decoder_config import SIGMOID, SOFTMAX, TEMPERATURE, YARN_LOG, has_bias
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.names import DEEPSEEK, LONG_FACTORS, SHORT_FACTORS, TensorLayout
from models.formats.gguf.rotary import longrope, rope_scaling


def _deepseek2(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of DeepSeek-V2 or V3.

    V3 has sigmoid expert gating; files of GLM-4.7-Flash do not name it, but have V3's corrections. Without expert
    groups, all experts are candidates.
    """
    read = file.read
    gating = read.expect("expert_gating_func", (SOFTMAX, SIGMOID, None), None)
    is_v3 = gating == SIGMOID or gating is None and any(".exp_probs_b." in name for name in file.tensors)
    read.expect(TEMPERATURE, (None, 0.0), None)
    values = _decoder(file) | _mixture(file)
    num_nextn = read.get("nextn_predict_layers", int, 0)
    values |= {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_hidden_layers": values["num_hidden_layers"] - num_nextn,  # the file counts these layers too
        "num_nextn_predict_layers": num_nextn,
        "rope_scaling": _yarn(file, values["qk_rope_head_dim"]),
    }
    groups = _groups(file)
    if is_v3 or groups["n_group"] > 1:
        values |= groups | {"topk_method": "noaux_tc" if is_v3 else "group_limited_greedy"}
    return values


def _mistral4(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Mistral Small 4. As in llama.cpp, queries grow only if the file has their factor."""
    read = file.read
    read.expect("expert_gating_func", (SOFTMAX, None), None)
    read.expect("rope.scaling.type", ("yarn",), None)
    values = _decoder(file) | _mixture(file) | _groups(file)
    original = read.count("rope.scaling.original_context_length")
    read.expect("attention.temperature_length", (original, None), None)
    rotary = _yarn(file, values["qk_rope_head_dim"]) or {}
    rotary |= {"rope_theta": values.pop("rope_theta"), "llama_4_scaling_beta": read.get(TEMPERATURE, float, 0.0)}
    return values | {"model_type": "mistral4", "rope_parameters": rotary}


def _minicpm3(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of MiniCPM3 with llama.cpp's constants. The file has no length of a value."""
    values = _decoder(file)
    return values | {
        "model_type": "minicpm3",
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_scaling": longrope(file),
    }


def _decoder(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of a decoder with multi-head latent attention, except the scaling of its rotary embedding.

    Since April 2025 key_length and value_length are lengths of the latent; separate `_mla` keys have the lengths of a
    head.
    """
    read = file.read
    keys = ("attention.head_count", "attention.kv_lora_rank", "rope.dimension_count", "embedding_length")
    heads, rank, rotary_dim, hidden_size = map(read.count, keys)
    suffix = "" if read.raw("attention.key_length_mla") is None else "_mla"
    if suffix:
        read.expect("attention.key_length", (rank + rotary_dim,), rank + rotary_dim)
        read.expect("attention.value_length", (rank,), rank)
    read.expect("attention.head_count_kv", (heads, 1), heads)
    key_length = read.count(f"attention.key_length{suffix}")
    if key_length <= rotary_dim:
        raise UserError(
            f"{file.header.path}: attention.key_length{suffix}={key_length} is not above rope.dimension_count={rotary_dim}"
        )
    return {
        "hidden_size": hidden_size,
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "q_lora_rank": read.get("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key_length - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": read.count(f"attention.value_length{suffix}", max(hidden_size // heads, 1)),
        "attention_bias": has_bias(file, "attn_kv_a_mqa"),
        "rms_norm_eps": read.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.count("context_length"),
        "rope_theta": read.positive("rope.freq_base", 10000.0),
    }


def _mixture(file: GGUFMetadata) -> dict[str, Any]:
    read = file.read
    return {
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "n_routed_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "n_shared_experts": read.count("expert_shared_count"),
        "routed_scaling_factor": read.get("expert_weights_scale", float, 0.0) or 1.0,
        "norm_topk_prob": read.get("expert_weights_norm", bool, False),
        "first_k_dense_replace": read.get("leading_dense_block_count", int, 0),
    }


def _groups(file: GGUFMetadata) -> dict[str, int]:
    read = file.read
    return {"n_group": read.count("expert_group_count", 1), "topk_group": read.count("expert_group_used_count", 1)}


def _yarn(file: GGUFMetadata, rotary_dim: int) -> dict[str, Any] | None:
    """Return rope_scaling with DeepSeek's correction of attention logits, or None."""
    scaling = rope_scaling(file, rotary_dim)
    if mscale := file.read.get("rope.scaling.yarn_log_multiplier", float, 0.0) / YARN_LOG:
        if scaling is None or scaling["rope_type"] != "yarn":
            raise UserError(f"{file.header.path}: rope.scaling.yarn_log_multiplier needs rope.scaling.type=yarn")
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    return scaling


CONFIGS: dict[str, Callable[[GGUFMetadata], dict[str, Any]]] = {
    "deepseek2": _deepseek2,
    "mistral4": _mistral4,
    "minicpm3": _minicpm3,
}
"""The function that returns the config's keys, by llama.cpp's architecture name."""
LAYOUTS: dict[str, TensorLayout] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), DEEPSEEK),
    "mistral4": replace(DEEPSEEK, joined_in_expert={"ffn_gate_up": ("gate_proj", "up_proj")}),
    "minicpm3": replace(DEEPSEEK, settings=(SHORT_FACTORS, LONG_FACTORS)),
}
"""By model_type."""

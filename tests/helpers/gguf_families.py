"""GGUF twins of the newer families, written like llama.cpp's converter. The gguf package maps the tensor names."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.helpers.gguf_files import write_tensors

ARCHITECTURES = {
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "bloom": gguf.MODEL_ARCH.BLOOM,
}
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
PREDICTION = re.compile(r"model\.layers\.(\d+)\.(eh_proj|embed_tokens|enorm|hnorm|shared_head\.(?:head|norm))\.weight")


def converted_tensors(folder: Path, splits_latent: bool = True) -> dict[str, np.ndarray]:
    """Return float32 arrays by llama.cpp's names. `splits_latent`: DeepSeek's kv_b_proj in two, as since April 2025."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(architecture, num_layers + config.get("num_nextn_predict_layers", 0))
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    stored = {name: tensor.float().numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, array in stored.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = array
            continue
        if match := PREDICTION.fullmatch(name):
            tensors[f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"] = array
            continue
        base_name = name.removeprefix("transformer.") if config["model_type"] == "bloom" else name
        for changed, part in changed_tensors(base_name, array, config, splits_latent):
            gguf_name = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, changed
            tensors[gguf_name] = np.ascontiguousarray(part)
    for name, arrays in experts.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        tensors[gguf_name] = np.stack([arrays[i] for i in sorted(arrays)])
    return tensors


def changed_tensors(
    name: str, array: np.ndarray, config: dict[str, Any], splits_latent: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Return the converter's changes to one tensor, under Hugging Face's names."""
    family = config["model_type"]
    if family.startswith("gemma") and name.endswith("norm.weight"):
        yield name, array + 1
    elif family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        yield name, array.T
    elif family == "bloom" and "query_key_value" in name:
        heads = config["n_head"]
        parts = array.reshape(heads, 3, array.shape[0] // heads // 3, *array.shape[1:])
        yield name, np.concatenate([parts[:, i].reshape(-1, *array.shape[1:]) for i in range(3)])
    elif name.endswith("kv_b_proj.weight") and splits_latent:
        heads, key_size = config["num_attention_heads"], config["qk_nope_head_dim"]
        parts = array.reshape(heads, key_size + config["v_head_dim"], -1)
        yield name.replace("kv_b_proj", "k_b_proj"), parts[:, :key_size].transpose(0, 2, 1)
        yield name.replace("kv_b_proj", "v_b_proj"), parts[:, key_size:]
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), array


def add_family_shape(writer: gguf.GGUFWriter, config: dict[str, Any], splits_latent: bool) -> None:
    family = config["model_type"]
    if family in ("gpt2", "bloom"):
        hidden_size = config["n_embd"] if family == "gpt2" else config["hidden_size"]
        writer.add_context_length(config.get("n_positions") or config.get("seq_length") or 2048)
        writer.add_embedding_length(hidden_size)
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config.get("n_inner") or 4 * hidden_size)
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if family != "gemma2":  # the file omits it, because theta is 10000
        writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family.startswith("deepseek"):
        add_deepseek(writer, config, rope, splits_latent)
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_head_count_kv(config["num_key_value_heads"])
    if family in ("phi3", "glm", "glm4"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if family != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in ("gemma2", "gemma3_text") and "sliding_attention" in config["layer_types"]:
        writer.add_sliding_window(config["sliding_window"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if family == "qwen3_moe":
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any], splits_latent: bool) -> None:
    rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key_length, value_length = config["qk_nope_head_dim"] + turning, config["v_head_dim"]
    writer.add_head_count_kv(1 if splits_latent else config["num_attention_heads"])
    writer.add_key_length(rank + turning if splits_latent else key_length)
    writer.add_value_length(rank if splits_latent else value_length)
    if splits_latent:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(turning)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if num_nextn := config.get("num_nextn_predict_layers", 0):
        writer.add_nextn_predict_layers(num_nextn)
    if config["n_group"] and config["n_group"] > 1 and config.get("topk_method") != "greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def write_family(folder: Path, file: Path, kind: str = "F32", splits_latent: bool = True, **metadata: Any) -> Path:
    """Write the twin of a checkpoint in Hugging Face's layout. `metadata`: further keys, with double underscores for
    dots."""
    config = json.loads((folder / "config.json").read_text())
    tensors = converted_tensors(folder, splits_latent)
    if not any(".nextn." in name for name in tensors):
        config["num_nextn_predict_layers"] = 0  # transformers saves no such layer, whatever its config says
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]])
    add_family_shape(writer, config, splits_latent)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        longer = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        implied = float(np.sqrt(1 + np.log(longer) / np.log(config["original_max_position_embeddings"])))
        writer.add_rope_scaling_attn_factors(implied)
        for length in ("short", "long"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    write_tensors(writer, tensors, kind)
    return file

"""Read the metadata of a GGUF file as config.json keys. Key names are from ggml's docs/gguf.md and gguf's constants.py.

Missing keys have llama.cpp's default for the architecture.
"""

from collections.abc import Callable
from typing import Any

import torch

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.gguf import (
    fused_attention,
    grouped_mixtures,
    latent_attention,
    layer_norm_decoders,
    llama_relatives,
)
from models.formats.gguf.decoder_config import (
    GEMMA_SCALED_BY_HIDDEN_SIZE,
    SOFTMAX,
    TEMPERATURE,
    WINDOW_PATTERN,
    decoder_shape,
    has_bias,
    rotary_decoder,
)
from models.formats.gguf.gemma_config import GEMMA3N_ARRAYS, GEMMA4_ARRAYS, gemma3n, gemma4
from models.formats.gguf.header import GGUFHeader, GGUFMetadata, TensorInfo, all_tensors
from models.formats.gguf.llama_relatives import ministral3
from models.formats.gguf.recurrent_config import (
    KEY_HEADS,
    NEMOTRON_ARRAYS,
    falcon_h1,
    granite,
    granite_hybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    mamba2,
    nemotron_h,
    qwen35,
    qwen35_moe,
)
from models.formats.gguf.rotary import longrope, partial_rotary_factor, rope_scaling, rotary_channels
from models.formats.gguf.special_tokens import NONE
from models.formats.gguf.tensors import STORED

END_TOKENS = ("eos", "eot", "eom")  # end of text, of turn, of message
NO_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout")  # provenance
CHATGLM_THETA = 10000.0  # multiplied by rope_ratio
BEYOND_FLOAT16 = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4")  # hidden states exceed float16's range


def read_gguf_config(headers: list[GGUFHeader]) -> ConfigReader:
    """Return the metadata as config.json keys. The tensors give the vocabulary size, head, biases and dtype.

    Raises UserError for an unsupported architecture or setting, and for sizes that the tensors cannot have.
    """
    header = headers[0]
    architecture = header.section("general").raw("architecture")
    if architecture not in FAMILIES:
        supported = ", ".join(map(repr, sorted(FAMILIES)))
        raise header.unsupported(f"general: architecture={architecture!r:.80} is not supported: only {supported}")
    tensors = all_tensors(headers)
    if not tensors:
        raise UserError(
            f"{header.path} holds a vocabulary and no tensors: give it as model.tokenizer=FILE, and a model as model.path"
        )
    prefix, arrays = f"{architecture}.", {f"{architecture}.{key}" for key in ARRAYS.get(architecture, ())}
    listed = next((key for key in header.arrays if key.startswith(prefix) and key not in arrays), None)
    if listed is not None:
        raise UserError(
            f"{header.path}: {listed[:80]!r} has a value for each layer, which is not supported: expected one number"
        )
    file = GGUFMetadata(header, header.section(architecture), tensors)
    _check_counts(file, architecture)
    file.read.expect("attention.causal", (True,), True)
    for key in NO_EFFECT:
        file.read.raw(key)
    embedding = tensors.get("token_embd.weight")
    values: dict[str, Any] = {
        "vocab_size": file.read.count("vocab_size", embedding.shape[0] if embedding else None),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _dtype(list(tensors.values()), architecture),
    }
    values |= FAMILIES[architecture](file) | _special_tokens(header.section("tokenizer.ggml"))
    unread = {f"{architecture}.{key}": file.read.raw(key) for key in file.read.unread()}
    return ConfigReader(values | unread, str(header.path))


def _check_counts(file: GGUFMetadata, architecture: str) -> None:
    """Raise UserError for more layers or experts than the tensors allow: their modules could use all memory."""
    most_experts = max([len(file.tensors), *(t.shape[0] for t in file.tensors.values() if len(t.shape) == 3)])
    for key, limit in (("block_count", len(file.tensors)), ("expert_count", most_experts)):
        if (number := file.read.get(key, int, 0)) > limit:
            raise UserError(
                f"{file.header.path}: {architecture}.{key}={number} is more than its {len(file.tensors)} tensors can hold"
            )


def _special_tokens(read: ConfigReader) -> dict[str, Any]:
    bos, *ends = (read.raw(f"{name}_token_id") for name in ("bos", *END_TOKENS))
    none = (None, -1, NONE)
    return {"bos_token_id": None if bos in none else bos, "eos_token_id": [id for id in ends if id not in none] or None}


def _dtype(tensors: list[TensorInfo], architecture: str) -> str:
    """Return the dtype of most stored bytes: float16 for quantised tensors. For Gemma, bfloat16 replaces float16.

    A dequantised value is a float16 scale times a small integer. float16 rounds it by 2^-12, bfloat16 by 2^-9, which is
    half a step of Q8_0.
    """
    stored = [tensor.type if tensor.type in STORED else None for tensor in tensors]
    num_bytes = {kind: sum(t.num_bytes for t, of in zip(tensors, stored, strict=True) if of is kind) for kind in stored}
    kind = max(num_bytes, key=num_bytes.__getitem__)
    dtype = torch.float16 if kind is None else STORED[kind]
    if dtype is torch.float16 and architecture in BEYOND_FLOAT16:
        dtype = torch.bfloat16
    return str(dtype).removeprefix("torch.")


def _window(file: GGUFMetadata) -> int | None:
    return None if file.read.raw("attention.sliding_window") is None else file.read.count("attention.sliding_window")


def _llama(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys for llama.cpp's `llama`: Mixtral if it has experts, Mistral if it has a window, else Llama."""
    shape, window = rotary_decoder(file), _window(file)
    if file.read.get("expert_count", int, 0):
        experts = {
            "num_local_experts": file.read.count("expert_count"),
            "num_experts_per_tok": file.read.count("expert_used_count"),
        }
        return shape | {"model_type": "mixtral", "sliding_window": window} | experts
    if window is not None:
        return shape | {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": has_bias(file, "attn_q"), "mlp_bias": has_bias(file, "ffn_gate")}
    return shape | {"model_type": "llama"} | biases


def _mistral3(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Ministral 3, or of a Mistral Small 3 without growing queries, which is a Llama."""
    return ministral3(file) if file.read.raw(TEMPERATURE) else _llama(file)


def _qwen(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of the first Qwen (2023).

    Its inner size counts both matrices. llama.cpp supports neither of its two scalings for long texts.
    """
    shape = rotary_decoder(file)
    length = shape["max_position_embeddings"]
    return {
        key: shape[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    } | {
        "model_type": "qwen",
        "kv_channels": shape["head_dim"],
        "layer_norm_epsilon": shape["rms_norm_eps"],
        "rotary_emb_base": shape["rope_theta"],
        "seq_length": length,
        "max_position_embeddings": length,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
    }


def _qwen2(file: GGUFMetadata) -> dict[str, Any]:
    return rotary_decoder(file) | {"model_type": "qwen2"}


def _qwen3(file: GGUFMetadata) -> dict[str, Any]:
    return rotary_decoder(file) | {"model_type": "qwen3", "attention_bias": has_bias(file, "attn_q")}


def _apertus(file: GGUFMetadata) -> dict[str, Any]:
    shape = rotary_decoder(file)
    scaling = shape["rope_scaling"] or {"rope_type": "default"}
    return shape | {"model_type": "apertus", "attention_bias": has_bias(file, "attn_q"), "rope_scaling": scaling}


def _qwen3_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Qwen3-MoE. llama.cpp always normalises the weights of a token's experts to a sum of 1."""
    file.read.expect("expert_gating_func", (SOFTMAX, None), None)
    file.read.expect("expert_weights_norm", (True, None), None)
    file.read.expect("expert_weights_scale", (None, 0.0, 1.0), None)
    return rotary_decoder(file) | {
        "model_type": "qwen3_moe",
        "attention_bias": has_bias(file, "attn_q"),
        "num_experts": file.read.count("expert_count"),
        "num_experts_per_tok": file.read.count("expert_used_count"),
        "moe_intermediate_size": file.read.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gpt_oss(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of gpt-oss, whose yarn does not truncate. llama.cpp has no key for it, and truncates."""
    shape, read = rotary_decoder(file), file.read
    read.expect("expert_feed_forward_length", (shape["intermediate_size"],), shape["intermediate_size"])
    scaling = shape["rope_scaling"]
    return shape | {
        "model_type": "gpt_oss",
        "attention_bias": has_bias(file, "attn_q"),
        "num_local_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "sliding_window": read.count("attention.sliding_window"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _gemma(file: GGUFMetadata, architecture: str) -> dict[str, Any]:
    shape = rotary_decoder(file)
    by_hidden_size = shape["num_hidden_layers"] == GEMMA_SCALED_BY_HIDDEN_SIZE[architecture]
    scale = shape["hidden_size"] / shape["num_attention_heads"] if by_hidden_size else float(shape["head_dim"])
    return shape | {"attention_bias": has_bias(file, "attn_q"), "query_pre_attn_scalar": scale}


def _gemma2(file: GGUFMetadata) -> dict[str, Any]:
    return _gemma(file, "gemma2") | {
        "model_type": "gemma2",
        "sliding_window": file.read.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.read.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.read.positive("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Gemma 3. Every sixth layer has full attention; without a window, all layers have it."""
    file.read.expect("attn_logit_softcapping", (None, 0.0), None)
    cap, window = file.read.get("final_logit_softcapping", float, 0.0), _window(file)
    pattern = file.read.count("attention.sliding_window_pattern", 6)
    return _gemma(file, "gemma3") | {
        "model_type": "gemma3_text",
        "sliding_window": window,
        "sliding_window_pattern": 1 if window is None else pattern,
        "rope_local_base_freq": file.read.positive("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": cap or None,
    }


def _phi3(file: GGUFMetadata) -> dict[str, Any]:
    shape, read = decoder_shape(file), file.read
    read.expect("attention.key_length", (shape["hidden_size"] // shape["num_attention_heads"],), shape["head_dim"])
    read.expect("rope.scaling.factor", (None, 0.0, 1.0), None)
    read.expect("rope.scaling.type", ("none", "longrope", None), None)
    window = read.get("attention.sliding_window", int, 0)
    return {key: value for key, value in shape.items() if key != "head_dim"} | {
        "model_type": "phi3",
        "sliding_window": read.count("attention.sliding_window") if window else None,
        "partial_rotary_factor": partial_rotary_factor(rotary_channels(file, shape["head_dim"]), shape["head_dim"]),
        "original_max_position_embeddings": read.count(
            "rope.scaling.original_context_length", shape["max_position_embeddings"]
        ),
        "rope_scaling": longrope(file),
    }


def _glm4(file: GGUFMetadata) -> dict[str, Any]:
    file.read.expect("nextn_predict_layers", (None, 0), None)
    return _glm(file) | {"model_type": "glm4"}


def _glm(file: GGUFMetadata) -> dict[str, Any]:
    shape = decoder_shape(file)
    channels = rotary_channels(file, shape["head_dim"])
    return shape | {
        "model_type": "glm",
        "attention_bias": has_bias(file, "attn_q"),
        "partial_rotary_factor": partial_rotary_factor(channels, shape["head_dim"]),
        "rope_scaling": rope_scaling(file, channels),
    }


def _chatglm(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of ChatGLM2, ChatGLM3 or GLM-4 in its original layout.

    A file with separate q, k and v matrices is GLM-4 in transformers' layout.
    """
    if "blk.0.attn_qkv.weight" not in file.tensors:
        return _glm(file)
    shape = decoder_shape(file)
    file.read.expect("rope.dimension_count", (shape["head_dim"] // 2,), shape["head_dim"] // 2)
    scaling = rope_scaling(file, shape["head_dim"] // 2)
    if scaling is None:
        rotary = {"rope_ratio": shape["rope_theta"] / CHATGLM_THETA}
    else:  # ChatGLM2-6B-32K, whose scaling the config reader recognises by name
        file.read.expect("rope.scaling.type", ("linear",), "linear")
        file.read.expect("rope.freq_base", (CHATGLM_THETA,), CHATGLM_THETA)
        rotary = {"rope_ratio": scaling["factor"], "_name_or_path": "chatglm2"}
    return rotary | {
        "model_type": "chatglm",
        "hidden_size": shape["hidden_size"],
        "ffn_hidden_size": shape["intermediate_size"],
        "num_layers": shape["num_hidden_layers"],
        "num_attention_heads": shape["num_attention_heads"],
        "multi_query_group_num": shape["num_key_value_heads"],
        "kv_channels": shape["head_dim"],
        "padded_vocab_size": file.read.count("vocab_size", file.tensors["token_embd.weight"].shape[0]),
        "layernorm_epsilon": shape["rms_norm_eps"],
        "seq_length": shape["max_position_embeddings"],
        "add_qkv_bias": has_bias(file, "attn_qkv"),
    }


def _gpt2(file: GGUFMetadata) -> dict[str, Any]:
    heads = file.read.count("attention.head_count")
    file.read.expect("attention.head_count_kv", (heads,), heads)
    return _gpt(file) | {"model_type": "gpt2"}


def _starcoder(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of GPT-BigCode. All queries share a key head; llama.cpp's converter supports nothing else."""
    file.read.expect("attention.head_count_kv", (1,), 1)
    return _gpt(file) | {"model_type": "gpt_bigcode", "multi_query": True}


def _gpt(file: GGUFMetadata) -> dict[str, Any]:
    read = file.read
    return {
        "n_embd": read.count("embedding_length"),
        "n_layer": read.count("block_count"),
        "n_head": read.count("attention.head_count"),
        "n_inner": read.count("feed_forward_length"),
        "n_positions": read.count("context_length"),
        "layer_norm_epsilon": read.positive("attention.layer_norm_epsilon"),
    }


def _mpt(file: GGUFMetadata) -> dict[str, Any]:
    read, heads = file.read, file.read.count("attention.head_count")
    hidden_size = read.count("embedding_length")
    read.expect("attention.head_count_kv", (heads,), heads)
    read.expect("attention.max_alibi_bias", (8.0,), 8.0)
    read.expect("feed_forward_length", (4 * hidden_size,), 4 * hidden_size)
    return {
        "model_type": "mpt",
        "d_model": hidden_size,
        "n_layers": read.count("block_count"),
        "n_heads": heads,
        "max_seq_len": read.count("context_length"),
        "layer_norm_epsilon": read.positive("attention.layer_norm_epsilon"),
        "attn_config": {"clip_qkv": read.get("attention.clamp_kqv", float, 0.0) or None},
    }


def _bloom(file: GGUFMetadata) -> dict[str, Any]:
    read, heads = file.read, file.read.count("attention.head_count")
    hidden_size = read.count("embedding_length")
    read.expect("attention.head_count_kv", (heads,), heads)
    read.expect("feed_forward_length", (4 * hidden_size,), 4 * hidden_size)
    return {
        "model_type": "bloom",
        "hidden_size": hidden_size,
        "n_layer": read.count("block_count"),
        "n_head": heads,
        "seq_length": read.count("context_length"),
        "layer_norm_epsilon": read.positive("attention.layer_norm_epsilon"),
    }


ARRAYS = {
    **dict.fromkeys(("lfm2", "lfm2moe", "granite", "granitehybrid", "kimi-linear"), (KEY_HEADS,)),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), NEMOTRON_ARRAYS),
    "gemma3n": GEMMA3N_ARRAYS,
    "gemma4": GEMMA4_ARRAYS,
    **dict.fromkeys(("exaone4", "exaone-moe", "olmo2"), (WINDOW_PATTERN,)),
    **dict.fromkeys(("qwen35", "qwen35moe"), ("rope.dimension_sections",)),
}
"""The keys that may have arrays, by architecture. The sections of the rotary embedding have no effect on text."""
FAMILIES: dict[str, Callable[[GGUFMetadata], dict[str, Any]]] = {
    **llama_relatives.CONFIGS,
    **layer_norm_decoders.CONFIGS,
    **grouped_mixtures.CONFIGS,
    **latent_attention.CONFIGS,
    **fused_attention.CONFIGS,
    "apertus": _apertus,
    "llama": _llama,
    "mistral3": _mistral3,
    "qwen": _qwen,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "phi3": _phi3,
    "glm4": _glm4,
    "chatglm": _chatglm,
    "gpt2": _gpt2,
    "starcoder": _starcoder,
    "mpt": _mpt,
    "bloom": _bloom,
    "kimi-linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2moe": lfm2_moe,
    "qwen3next": qwen35_moe,
    "qwen35": qwen35,
    "qwen35moe": qwen35_moe,
    "granite": granite,
    "granitehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "mamba2": mamba2,
    "falcon-h1": falcon_h1,
}
"""The function that returns the config's keys, by llama.cpp's architecture name."""

"""The config.json keys of Gemma 3n and 4, from the metadata of a GGUF file."""

from statistics import NormalDist
from typing import Any

from conf.errors import UserError
from models.families.gemma2 import FULL, SLIDING
from models.formats.gguf.decoder_config import has_bias, rotary_decoder
from models.formats.gguf.header import GGUFMetadata, TensorInfo
from models.formats.gguf.names import ROTARY_FACTORS
from models.formats.gguf.tensors import read_tensor

KEY_HEADS, INNER_SIZE, PATTERN = (
    "attention.head_count_kv",
    "feed_forward_length",
    "attention.sliding_window_pattern",
)
CUTOFFS = "activation_sparsity_scale"
GEMMA3N_ARRAYS = INNER_SIZE, PATTERN, CUTOFFS
GEMMA4_ARRAYS = KEY_HEADS, INNER_SIZE, PATTERN
"""The keys with a value for each layer. Key heads and inner size may be one number."""
INPUT_TABLE = "per_layer_token_embd.weight"
UNROTATED = 1e30
"""The factor of the frequencies of channels that do not rotate."""


def gemma3n(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Gemma 3n. llama.cpp always scales the active stream, and always has a soft cap.

    The converter pads the table of inputs per layer with zeros to the whole vocabulary.
    """
    read, num_layers = file.read, file.read.count("block_count")
    is_sliding = file.header.numbers(f"gemma3n.{PATTERN}", "b", num_layers)
    cutoffs = file.header.numbers(f"gemma3n.{CUTOFFS}", "f", num_layers)
    inner_sizes = _by_layer(file, "gemma3n", INNER_SIZE, num_layers)
    table, left = (_tensor(file, name) for name in (INPUT_TABLE, "blk.0.laurel_l.weight"))
    return rotary_decoder(file, inner_sizes[0]) | {
        "model_type": "gemma3n_text",
        "intermediate_size": inner_sizes,
        "layer_types": [SLIDING if slides else FULL for slides in is_sliding],
        "sliding_window": read.count("attention.sliding_window"),
        "rope_local_base_freq": read.positive("rope.freq_base_swa", 1e4),
        "num_kv_shared_layers": read.require("attention.shared_kv_layers", int),
        "attention_bias": has_bias(file, "attn_q"),
        "final_logit_softcapping": read.positive("final_logit_softcapping", 30.0),
        "hidden_size_per_layer_input": read.count("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
        "altup_num_inputs": read.count("altup.num_inputs"),
        "altup_active_idx": read.get("altup.active_idx", int, 0),
        "laurel_rank": left.shape[0],
        # the file has the number of deviations above the mean; -inf: the gate keeps all values
        "activation_sparsity_pattern": [NormalDist().cdf(cutoff) for cutoff in cutoffs],
    }


def _tensor(file: GGUFMetadata, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise UserError(f"{file.header.path}: the tensor {name!r} is missing")
    return file.tensors[name]


def gemma4(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Gemma 4."""
    read, num_layers = file.read, file.read.count("block_count")
    is_sliding = file.header.numbers(f"gemma4.{PATTERN}", "b", num_layers)
    num_sharing = read.get("attention.shared_kv_layers", int, 0)
    key_heads, inner_sizes = (_by_layer(file, "gemma4", key, num_layers) for key in (KEY_HEADS, INNER_SIZE))
    own = range(max(0, num_layers - num_sharing))
    full = {
        str(i): {"head_dim": read.count("attention.key_length"), "num_key_value_heads": key_heads[i]}
        for i in range(num_layers)
        if not is_sliding[i]
    }
    values = {
        "model_type": "gemma4_text",
        "hidden_size": read.count("embedding_length"),
        "intermediate_size": inner_sizes[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": read.count("attention.head_count"),
        "num_key_value_heads": next((key_heads[i] for i in range(num_layers) if is_sliding[i]), key_heads[0]),
        "head_dim": read.count("attention.key_length_swa"),
        "per_layer_config": full,
        "layer_types": [SLIDING if slides else FULL for slides in is_sliding],
        "sliding_window": read.count("attention.sliding_window"),
        "num_kv_shared_layers": num_sharing,
        "use_double_wide_mlp": inner_sizes[-1] != inner_sizes[0],
        "attention_k_eq_v": any(not is_sliding[i] and f"blk.{i}.attn_v.weight" not in file.tensors for i in own),
        "attention_bias": has_bias(file, "attn_q"),
        "rms_norm_eps": read.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.count("context_length"),
        "final_logit_softcapping": read.get("final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": _rotary(file),
    }
    for key in ("attention.value_length", "attention.value_length_swa"):
        keys = read.count(key.replace("value", "key"))
        read.expect(key, (keys,), keys)
    return values | _layer_inputs(file) | _mixture(file)


def _by_layer(file: GGUFMetadata, architecture: str, key: str, num_layers: int) -> list[int]:
    """Return the numbers above 0 of a key, one for each layer."""
    name = f"{architecture}.{key}"
    if name not in file.header.arrays:
        return [file.read.count(key)] * num_layers
    numbers: list[int] = file.header.numbers(name, "i", num_layers)
    if min(numbers) < 1:
        raise UserError(f"{file.header.path}: {name}={numbers} has a number that is not above 0")
    return numbers


def _rotary(file: GGUFMetadata) -> dict[str, Any]:
    """Return the rotary settings. A tensor has the factors of the full-attention layers' frequencies: 1, then 1e30."""
    read = file.read
    for suffix in ("", "_swa"):
        channels = read.count(f"attention.key_length{suffix}")
        read.expect(f"rope.dimension_count{suffix}", (channels, None), channels)
    share, channels = 1.0, read.count("attention.key_length")
    if (tensor := file.tensors.get(ROTARY_FACTORS)) is not None:
        factors = read_tensor(tensor).flatten().tolist()
        num_rotated = factors.count(1.0)
        expected = [1.0] * num_rotated + [UNROTATED] * (channels // 2 - num_rotated)
        if not num_rotated or any(abs(a / b - 1) > 1e-6 for a, b in zip(factors, expected, strict=False)):
            raise file.header.unsupported(f"{ROTARY_FACTORS} holds factors other than 1, and then {UNROTATED:g}")
        if len(factors) != channels // 2:
            raise UserError(f"{tensor.path}: {ROTARY_FACTORS} has {len(factors)} factors, expected {channels // 2}")
        share = num_rotated / len(factors)
    return {
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": read.positive("rope.freq_base", 1e6),
        },
        SLIDING: {"rope_type": "default", "rope_theta": read.positive("rope.freq_base_swa", 1e4)},
    }


def _layer_inputs(file: GGUFMetadata) -> dict[str, Any]:
    channels = file.read.get("embedding_length_per_layer_input", int, 0)
    if not channels:
        return {"hidden_size_per_layer_input": 0}
    rows = _tensor(file, INPUT_TABLE).shape[0]
    return {"hidden_size_per_layer_input": channels, "vocab_size_per_layer_input": rows}


def _mixture(file: GGUFMetadata) -> dict[str, Any]:
    if not file.read.get("expert_count", int, 0):
        for key in ("expert_used_count", "expert_feed_forward_length"):
            file.read.raw(key)
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": file.read.count("expert_count"),
        "top_k_experts": file.read.count("expert_used_count"),
        "moe_intermediate_size": file.read.count("expert_feed_forward_length"),
    }

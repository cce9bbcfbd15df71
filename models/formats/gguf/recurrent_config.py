"""The config.json keys of architectures with recurrent layers, and of Granite, from the metadata of a GGUF file."""

from typing import Any

from conf.errors import UserError
from models.formats.gguf.decoder_config import SIGMOID, SOFTMAX, decoder_shape, has_bias, rotary_decoder
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.rotary import partial_rotary_factor, rope_scaling, rotary_channels
from models.layers.layer_types import FULL, LINEAR

KEY_HEADS = "attention.head_count_kv"
"""A number, or in most files an array with a number for each layer: 0 for a recurrent layer."""
RMS_EPS = "attention.layer_norm_rms_epsilon"
OF_HYBRIDS = (
    *("expert_shared_feed_forward_length", "expert_used_count", "ssm.conv_kernel", "ssm.group_count"),
    *("ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
)
"""Keys without effect on a Granite 4 without recurrent layers."""


def _key_heads(
    file: GGUFMetadata, architecture: str, num_layers: int, tensor: str = "attn_q"
) -> tuple[int, list[bool]]:
    """Return the number of key heads, and for each layer whether it has them. `tensor`: of attention layers alone."""
    key = f"{architecture}.{KEY_HEADS}"
    counts = file.header.numbers(key, "i", num_layers)
    numbers = {count for count in counts if count}
    if len(numbers) != 1 or min(counts) < 0:
        problem = f"{file.header.path}: {key}={counts} needs one number of key heads for all layers with attention"
        raise UserError(f"{problem}, and 0 for all other layers")
    for i, count in enumerate(counts):
        name = f"blk.{i}.{tensor}.weight"
        if (count > 0) != (name in file.tensors):
            problem = f"{file.header.path}: {key}={count} of layer {i}, but the file has {'no ' * (count > 0)}{name!r}"
            raise UserError(f"{problem}: convert the model again")
    return numbers.pop(), [count > 0 for count in counts]


def _inner_size(file: GGUFMetadata, *multiple_of: str) -> int:
    """Return the channels of a recurrent layer. Raises UserError unless they are a multiple of these keys."""
    inner_size = file.read.count("ssm.inner_size")
    for key in multiple_of:
        if inner_size % (size := file.read.count(key)):
            raise UserError(f"{file.header.path}: ssm.inner_size={inner_size} is not a multiple of {key}={size}")
    return inner_size


def lfm2(file: GGUFMetadata, architecture: str = "lfm2") -> dict[str, Any]:
    """Return the keys of LFM2. Layers without key heads are convolutions."""
    shape = rotary_decoder(file)
    num_key_heads, has_keys = _key_heads(file, architecture, shape["num_hidden_layers"])
    return shape | {
        "model_type": "lfm2",
        "num_key_value_heads": num_key_heads,
        "norm_eps": shape.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if has_key else "conv" for has_key in has_keys],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.read.count("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.tensors),
    }


def lfm2_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of LFM2-MoE. llama.cpp always normalises the weights of a token's experts to a sum of 1."""
    file.read.expect("expert_gating_func", (SIGMOID,), SIGMOID)
    file.read.expect("expert_weights_norm", (True, None), None)
    values = lfm2(file, "lfm2moe")
    del values["block_auto_adjust_ff_dim"]
    return values | {
        "model_type": "lfm2_moe",
        "num_experts": file.read.count("expert_count"),
        "num_experts_per_tok": file.read.count("expert_used_count"),
        "moe_intermediate_size": file.read.count("expert_feed_forward_length"),
        "num_dense_layers": file.read.get("leading_dense_block_count", int, 0),
        "use_expert_bias": any("exp_probs_b" in name for name in file.tensors),
        "routed_scaling_factor": file.read.get("expert_weights_scale", float, 0.0) or 1.0,
    }


def kimi_linear(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Kimi Linear. Layers without key heads are Kimi Delta Attention, with as many heads as attention.

    llama.cpp always normalises the weights of a token's experts to a sum of 1.
    """
    read, num_layers = file.read, file.read.count("block_count")
    read.expect("expert_gating_func", (SIGMOID, None), None)
    for key in ("attention.key_length", "attention.value_length", "rope.freq_base"):
        read.raw(key)  # of the latent, and without effect
    heads, rotary_dim = read.count("attention.head_count"), read.count("rope.dimension_count")
    has_keys = _key_heads(file, "kimi-linear", num_layers, "attn_kv_a_mqa")[1]
    if (key_length := read.count("attention.key_length_mla")) <= rotary_dim:
        problem = f"{file.header.path}: attention.key_length_mla={key_length}"
        raise UserError(f"{problem} is not above rope.dimension_count={rotary_dim}")
    return {
        "model_type": "kimi_linear",
        "hidden_size": read.count("embedding_length"),
        "intermediate_size": read.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "q_lora_rank": read.get("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": read.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_length - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": read.count("attention.value_length_mla"),
        "rms_norm_eps": read.positive(RMS_EPS),
        "model_max_length": read.count("context_length"),
        "layer_types": ["full_attention" if has_key else "linear_attention" for has_key in has_keys],
        "linear_num_heads": heads,
        "linear_head_dim": read.count("kda.head_dim"),
        "linear_conv_kernel_dim": read.count("ssm.conv_kernel"),
        "first_k_dense_replace": read.get("leading_dense_block_count", int, 0),
        "num_experts": read.count("expert_count"),
        "num_experts_per_token": read.count("expert_used_count"),
        "num_shared_experts": read.count("expert_shared_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "num_expert_group": read.count("expert_group_count", 1),
        "topk_group": read.count("expert_group_used_count", 1),
        "moe_renormalize": read.get("expert_weights_norm", bool, True),
        "routed_scaling_factor": read.get("expert_weights_scale", float, 0.0) or 1.0,
    }


def qwen35(file: GGUFMetadata, inner_size: int | None = None) -> dict[str, Any]:
    """Return the keys of Qwen3.5. The file's last layers may be for multi-token prediction, which is not loaded."""
    read, shape = file.read, decoder_shape(file, inner_size)
    channels, values = rotary_channels(file, shape["head_dim"]), read.count("ssm.time_step_rank")
    inner_size = _inner_size(file, "ssm.time_step_rank")
    shape["num_hidden_layers"] -= read.get("nextn_predict_layers", int, 0)
    return shape | {
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": partial_rotary_factor(channels, shape["head_dim"]),
        "rope_scaling": rope_scaling(file, channels),
        "linear_num_key_heads": read.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": read.count("ssm.state_size"),
        "linear_value_head_dim": inner_size // values,
        "linear_conv_kernel_dim": read.count("ssm.conv_kernel"),
        "full_attention_interval": read.count("full_attention_interval", 4),
    }


def qwen35_moe(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Qwen3.5-MoE. llama.cpp always normalises the weights of a token's experts to a sum of 1."""
    file.read.expect("expert_gating_func", (SOFTMAX, None), None)
    file.read.expect("expert_weights_norm", (True, None), None)
    width = file.read.count("expert_feed_forward_length")
    return qwen35(file, width) | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": file.read.count("expert_count"),
        "num_experts_per_tok": file.read.count("expert_used_count"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": file.read.count("expert_shared_feed_forward_length", width),
    }


def granite(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Granite 3, and of Granite 4 without recurrent layers."""
    shape = rotary_decoder(file)
    file.read.expect("rope.scaling.finetuned", (True, None), True)  # else nothing is rotated
    for key in OF_HYBRIDS:
        file.read.raw(key)
    if f"granite.{KEY_HEADS}" in file.header.arrays:
        shape["num_key_value_heads"], has_keys = _key_heads(file, "granite", shape["num_hidden_layers"])
        if not all(has_keys):
            raise UserError(
                f"{file.header.path}: granite.{KEY_HEADS} is 0 for a layer: expected attention in all layers"
            )
    biases = {"attention_bias": has_bias(file, "attn_q"), "mlp_bias": has_bias(file, "ffn_gate")}
    return shape | {"model_type": "granite"} | biases | _multipliers(file)


def _multipliers(file: GGUFMetadata) -> dict[str, float]:
    """Return Granite's factors. llama.cpp uses none of them if it is 0, and 1 / sqrt(D) for the attention's."""
    heads, hidden_size = file.read.count("attention.head_count"), file.read.count("embedding_length")
    names = {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "attention_multiplier": ("attention.scale", (heads / hidden_size) ** 0.5),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return {name: file.read.get(key, float, 0.0) or default for name, (key, default) in names.items()}


def granite_hybrid(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Granite 4 with recurrent layers. llama.cpp rotates if the key of the switch is absent."""
    has_rotary = file.read.get("rope.scaling.finetuned", bool, True)
    read, shape = file.read, (rotary_decoder if has_rotary else decoder_shape)(file)
    num_key_heads, has_keys = _key_heads(file, "granitehybrid", shape["num_hidden_layers"])
    inner_size, hidden_size = _inner_size(file, "embedding_length", "ssm.time_step_rank"), shape["hidden_size"]
    read.raw("rope.dimension_count")
    names = file.tensors
    return (
        shape
        | _multipliers(file)
        | {
            "model_type": "granitemoehybrid",
            "num_key_value_heads": num_key_heads,
            "layer_types": ["attention" if has_key else "mamba" for has_key in has_keys],
            "position_embedding_type": "rope" if has_rotary else "nope",
            "attention_bias": any(name.endswith("attn_q.bias") for name in names),
            "shared_intermediate_size": read.count("expert_shared_feed_forward_length", shape["intermediate_size"]),
            "num_local_experts": read.get("expert_count", int, 0),
            "num_experts_per_tok": read.get("expert_used_count", int, 0),
            "mamba_expand": inner_size // hidden_size,
            "mamba_n_heads": read.count("ssm.time_step_rank"),
            "mamba_d_head": inner_size // read.count("ssm.time_step_rank"),
            "mamba_d_state": read.count("ssm.state_size"),
            "mamba_n_groups": read.count("ssm.group_count"),
            "mamba_d_conv": read.count("ssm.conv_kernel"),
            "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in names),
            "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in names),
        }
    )


def falcon_h1(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Falcon-H1. The weights of the file contain the factors. llama.cpp's norm reads gated heads."""
    shape, read = rotary_decoder(file), file.read
    inner_size, heads = read.count("ssm.inner_size"), read.count("ssm.time_step_rank")
    return shape | {
        "model_type": "falcon_h1",
        "attention_bias": has_bias(file, "attn_q"),
        "mlp_bias": has_bias(file, "ffn_gate"),
        "mamba_d_ssm": inner_size,
        "mamba_n_heads": heads,
        "mamba_d_head": inner_size // heads,
        "mamba_d_state": read.count("ssm.state_size"),
        "mamba_n_groups": read.count("ssm.group_count"),
        "mamba_d_conv": read.count("ssm.conv_kernel"),
        "mamba_conv_bias": has_bias(file, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(file, "ssm_in"),
        "projectors_bias": has_bias(file, "ssm_out"),
        "mamba_rms_norm": any(name.endswith("ssm_norm.weight") for name in file.tensors),
        "mamba_norm_before_gate": False,
    }


LAYER_TYPES = {"ssm_in": LINEAR, "attn_q": FULL, "ffn_up": "mlp", "ffn_up_exps": "moe"}
"""Nemotron-H's layer types by a tensor that only layers of this type have."""
NEMOTRON_ARRAYS = ("feed_forward_length", KEY_HEADS)


def nemotron_h(file: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of Nemotron-H and Nemotron Nano. The tensors show the types of the layers."""
    read, num_layers = file.read, file.read.count("block_count")
    types = [
        next((kind for name, kind in LAYER_TYPES.items() if f"blk.{i}.{name}.weight" in file.tensors), None)
        for i in range(num_layers)
    ]
    if None in types:
        raise UserError(
            f"{file.header.path}: layer {types.index(None)} has none of the tensors {', '.join(LAYER_TYPES)}: "
            "convert the model again"
        )
    num_key_heads = _check_nemotron_layers(file, types)
    dense = types.index("mlp") if "mlp" in types else None
    other_eps = "attention.layer_norm_epsilon"
    eps = read.positive(other_eps if read.raw(RMS_EPS) is None else RMS_EPS)
    for key in ("rope.scaling.finetuned", "rope.dimension_count", "rope.freq_base", other_eps):
        read.raw(key)  # nothing is rotated, and all norms are RMSNorm
    head_dim = read.count("attention.key_length")
    read.expect("attention.value_length", (head_dim,), head_dim)
    values = {
        "model_type": "nemotron_h",
        "hidden_size": read.count("embedding_length"),
        "intermediate_size": 1 if dense is None else file.tensors[f"blk.{dense}.ffn_up.weight"].shape[0],
        "layers_block_type": types,
        "num_attention_heads": read.count("attention.head_count"),
        "num_key_value_heads": num_key_heads or read.count("attention.head_count"),
        "head_dim": head_dim,
        "layer_norm_epsilon": eps,
        "max_position_embeddings": read.count("context_length"),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in file.tensors),
        "use_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_num_heads": read.count("ssm.time_step_rank"),
        "mamba_head_dim": _inner_size(file, "ssm.time_step_rank") // read.count("ssm.time_step_rank"),
        "ssm_state_size": read.count("ssm.state_size"),
        "n_groups": read.count("ssm.group_count"),
        "conv_kernel": read.count("ssm.conv_kernel"),
    }
    return values | (_nemotron_experts(file) if "moe" in types else {})


def _check_nemotron_layers(file: GGUFMetadata, types: list[str | None]) -> int:
    """Return the number of key heads; 0 if no layer has attention.

    Raises UserError if the arrays of the layers' key heads and inner sizes contradict the tensors.
    """
    architecture = file.header.section("general").raw("architecture")
    inner_sizes, key_heads = (file.header.numbers(f"{architecture}.{key}", "i", len(types)) for key in NEMOTRON_ARRAYS)
    num_key_heads: int = max(key_heads)
    if FULL in types and not num_key_heads:
        i = types.index(FULL)
        problem = f"{file.header.path}: {architecture}.{KEY_HEADS}=0 of layer {i} contradicts 'blk.{i}.attn_q.weight'"
        raise UserError(f"{problem}: expected a number above 0: convert the model again")
    for i, (kind, inner_size, heads) in enumerate(zip(types, inner_sizes, key_heads, strict=True)):
        name = f"blk.{i}.{next(tensor for tensor, of in LAYER_TYPES.items() if of == kind)}.weight"
        rows = file.tensors[name].shape[-2] if kind in ("mlp", "moe") else 0
        numbers = {"feed_forward_length": (inner_size, rows), KEY_HEADS: (heads, num_key_heads * (kind == FULL))}
        for key, (number, expected) in numbers.items():
            if number != expected and (number or key == KEY_HEADS):  # transformers' configs lack dense layers' sizes
                problem = f"{file.header.path}: {architecture}.{key}={number} of layer {i} contradicts {name!r}"
                raise UserError(f"{problem}: expected {expected}: convert the model again")
    return num_key_heads


def _nemotron_experts(file: GGUFMetadata) -> dict[str, Any]:
    read = file.read
    read.expect("expert_gating_func", (SIGMOID, None), None)
    read.expect("expert_shared_count", (1, None), None)
    return {
        "n_routed_experts": read.count("expert_count"),
        "num_experts_per_tok": read.count("expert_used_count"),
        "moe_intermediate_size": read.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": read.count("expert_shared_feed_forward_length"),
        "moe_latent_size": None if read.raw("moe_latent_size") is None else read.count("moe_latent_size"),
        "norm_topk_prob": read.get("expert_weights_norm", bool, True),
        "routed_scaling_factor": read.get("expert_weights_scale", float, 0.0) or 1.0,
        "n_group": read.count("expert_group_count", 1),
        "topk_group": read.count("expert_group_used_count", 1),
    }


def mamba2(file: GGUFMetadata) -> dict[str, Any]:
    read, hidden_size = file.read, file.read.count("embedding_length")
    inner_size = _inner_size(file, "embedding_length", "ssm.time_step_rank")
    heads = read.count("ssm.time_step_rank")
    for key in ("context_length", "feed_forward_length", "attention.head_count"):
        read.raw(key)  # without effect
    return {
        "model_type": "mamba2",
        "hidden_size": hidden_size,
        "num_hidden_layers": read.count("block_count"),
        "layer_norm_epsilon": read.positive(RMS_EPS),
        "use_bias": any(name.endswith("ssm_in.bias") for name in file.tensors),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "expand": inner_size // hidden_size,
        "num_heads": heads,
        "head_dim": inner_size // heads,
        "state_size": read.count("ssm.state_size"),
        "n_groups": read.count("ssm.group_count"),
        "conv_kernel": read.count("ssm.conv_kernel"),
    }

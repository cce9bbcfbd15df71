"""Read PaddleNLP's config.json, or model_config.json of older versions, as keys of Hugging Face's config.json."""

import re
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.paddle.names import PREFIXES, TYPES, Names, names_of

CONFIGS = ("config.json", "model_config.json")
RENAMED = {
    "chatglm_v2": {
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "max_sequence_length": "seq_length",
    },
    "gpt": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
}
"""By PaddleNLP's `model_type`: PaddleNLP's keys that have another name in Hugging Face's config.json."""
ONLY_VALUES: dict[str, Any] = {"alibi": False, "use_long_sequence_strategies": False}
ONLY_VALUES_BY_TYPE: dict[str, dict[str, Any]] = {
    "ernie": {
        "architectures": ["Ernie35ForCausalLM"],  # other models of this type are encoders
        "weight_share": False,  # true: the head is tied to the embedding
    },
    "gpt": {
        "hidden_act": "gelu",
        "hidden_activation": "gelu",
        "normalize_before": True,
        "num_experts": 1,
        "scale_qk_coeff": 1.0,
    },
}
"""By PaddleNLP key, the only supported value: with it, PaddleNLP computes the same as the architectures here.

ONLY_VALUES is for all families, ONLY_VALUES_BY_TYPE for single ones.
"""
HARMLESS = frozenset(
    """
    attention_probs_dropout_prob dpo_config eol_token_id fuse_attention_ffn fuse_attention_qkv fuse_linear fuse_ln
    fuse_sequence_parallel_allreduce fused_linear hidden_dropout_prob ignored_index immediate_clear_past_key_value lm_shift_labels
    no_recompute_layers output_attentions output_hidden_states paddlenlp_version pp_recompute_interval recompute_granularity
    recompute_use_reentrant return_dict rope_fusion_level sep_parallel_degree seqlen sequence_parallel tensor_parallel_degree
    tensor_parallel_output tensor_parallel_rank topo type_vocab_size use_fast_layer_norm use_flash_attention use_fused_dropout_add
    use_fused_linear use_fused_rms_norm use_fused_rope use_progressive_seq_len use_recompute use_recompute_attn virtual_pp_degree
    """.split()
)
"""Settings of training, of ranks, and of kernels with the same result."""


def config_file(folder: Path) -> Path:
    """Return the config file of a folder; the newer name if there is none."""
    return next((folder / name for name in CONFIGS if (folder / name).is_file()), folder / CONFIGS[0])


def paddle_prefix(folder: Path) -> str | None:
    """Return PaddleNLP's prefix of tensor names; None if the config cannot be PaddleNLP's.

    Returns a prefix also for an unsupported `model_type` if the config has paddlenlp_version, so that the error can
    name it.
    """
    values = _values(config_file(folder))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or (model_type not in PREFIXES and "paddlenlp_version" not in values):
        return None
    return PREFIXES[model_type][0] if model_type in PREFIXES else re.split(r"[\d_]", model_type)[0]


def read_paddle_config(folder: Path) -> tuple[ConfigReader, Names]:
    """Return the config in Hugging Face's keys, and the names of the weights.

    Raises UserError for another `model_type`, and for settings with which Hugging Face's classes compute another
    result.
    """
    file = config_file(folder)
    if not file.is_file():
        raise UserError(f"{folder} has PaddleNLP's weights, but neither config.json nor model_config.json")
    paddle_config = ConfigReader(_values(file), str(file))
    model_type = paddle_config.require("model_type", str)
    if model_type not in PREFIXES:
        raise UserError(
            f"{file}: PaddleNLP's model_type={model_type!r} is not supported: only {', '.join(sorted(PREFIXES))}: "
            "give the model in Hugging Face's layout"
        )
    supported = ONLY_VALUES | ONLY_VALUES_BY_TYPE.get(model_type, {})
    for key, value in supported.items():
        paddle_config.expect(key, (value, None), value)
    left_out = HARMLESS | supported.keys() | {"rope_scaling_type", "rope_scaling_factor"}
    if model_type not in ("bloom", "qwen"):
        left_out |= {"seq_length"}  # a training setting; another key has the longest context
    renamed = RENAMED.get(model_type, {})
    values = {renamed.get(key, key): value for key, value in paddle_config.values.items() if key not in left_out}
    values["model_type"] = TYPES.get(model_type, model_type)
    if model_type == "gpt":
        values["layer_norm_epsilon"] = 1e-5  # from PaddleNLP's code: its config has no such key
        values["activation_function"] = "gelu_pytorch_tanh"
    return ConfigReader(values | _rope(paddle_config), str(file)), _names(paddle_config, model_type)


def _values(file: Path) -> dict[str, Any]:
    """Return the file's keys.

    In the nested form of older versions, they are the keys of the class that has the layers.
    """
    values = read_json(file)
    while isinstance(values.get("init_args"), list) and values["init_args"]:
        name, inner = values.get("init_class"), values["init_args"][0]
        if not isinstance(inner, dict):
            raise UserError(f"{file}: init_args={str(values['init_args'])[:40]} does not begin with an object")
        values = inner | {"architectures": [name]}
    if str(values.get("init_class")).startswith("GPT"):
        values.setdefault("model_type", "gpt")
    return {key: value for key, value in values.items() if key != "init_class"}


def _rope(config: ConfigReader) -> dict[str, Any]:
    """Return `rope_scaling` for PaddleNLP's two keys. PaddleNLP's NTK scalings differ from Hugging Face's."""
    if config.expect("rope_scaling_type", (None, "linear"), None) is None:
        return {}
    return {"rope_scaling": {"type": "linear", "factor": config.positive("rope_scaling_factor", 1.0)}}


def _names(config: ConfigReader, model_type: str) -> Names:
    heads = config.count("n_head" if config.raw("n_head") is not None else "num_attention_heads")
    groups = config.count("multi_query_group_num" if model_type == "chatglm_v2" else "num_key_value_heads", heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    hidden = config.count("n_embed" if config.raw("n_embed") is not None else "hidden_size")
    head_dim = config.count("head_dim", max(hidden // heads, 1))
    is_tied = config.get("tie_word_embeddings", bool, False) or model_type == "gpt"
    wide = config.count("intermediate_size", 1)
    return names_of(model_type, is_tied, heads, groups, head_dim, wide)

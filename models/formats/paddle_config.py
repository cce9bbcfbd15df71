"""Read PaddleNLP's config.json, or model_config.json of its older versions, as the keys of Hugging Face's config.json."""

import re
from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.paddle_names import PREFIXES, TYPES, Names, names_of

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
"""By PaddleNLP's `model_type` its keys that are called otherwise in Hugging Face's config.json."""
KNOWN: dict[str, Any] = {"alibi": False, "use_long_sequence_strategies": False}
KNOWN_OF: dict[str, dict[str, Any]] = {
    "ernie": {
        "architectures": ["Ernie35ForCausalLM"],  # other models of that type are encoders
        "weight_share": False,  # ties the head to the embedding
    },
    "gpt": {
        "hidden_act": "gelu",
        "hidden_activation": "gelu",
        "normalize_before": True,
        "num_experts": 1,
        "scale_qk_coeff": 1.0,
    },
}
"""By key of PaddleNLP, for all families and for some, the one value with which its code computes what the architectures here do."""
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
"""Settings of training, of ranks, and of kernels that compute the same."""


def config_file(folder: Path) -> Path:
    """Return the config of a folder; the newer one where there is none."""
    return next((folder / name for name in CONFIGS if (folder / name).is_file()), folder / CONFIGS[0])


def paddle_prefix(folder: Path) -> str | None:
    """Return how tensors would be called where PaddleNLP has written them; None where its config cannot be PaddleNLP's.

    A `model_type` that is not read counts where PaddleNLP's version is beside it, so that it can be refused by name.
    """
    values = _values(config_file(folder))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or (model_type not in PREFIXES and "paddlenlp_version" not in values):
        return None
    return PREFIXES[model_type][0] if model_type in PREFIXES else re.split(r"[\d_]", model_type)[0]


def read_paddle_config(folder: Path) -> tuple[ConfigReader, Names]:
    """Return the config in Hugging Face's keys, and the names of the weights.

    Raises UserError for another `model_type` and for settings that compute something else than Hugging Face's classes do.
    """
    file = config_file(folder)
    if not file.is_file():
        raise UserError(f"{folder} has PaddleNLP's weights, but no config.json and no model_config.json")
    found = ConfigReader(_values(file), str(file))
    model_type = found.require("model_type", str)
    if model_type not in PREFIXES:
        raise UserError(
            f"{file}: PaddleNLP's model_type={model_type!r} is not read: only {', '.join(sorted(PREFIXES))}: "
            "give the model's checkpoint in Hugging Face's layout"
        )
    known = KNOWN | KNOWN_OF.get(model_type, {})
    for key, value in known.items():
        found.expect(key, (value, None), value)
    left_out = HARMLESS | known.keys() | {"rope_scaling_type", "rope_scaling_factor"}
    if model_type not in ("bloom", "qwen"):
        left_out |= {"seq_length"}  # of training, beside the longest context
    renamed = RENAMED.get(model_type, {})
    values = {renamed.get(key, key): value for key, value in found.values.items() if key not in left_out}
    values["model_type"] = TYPES.get(model_type, model_type)
    if model_type == "gpt":
        values["layer_norm_epsilon"] = 1e-5  # which its code has and its config lacks
        values["activation_function"] = "gelu_pytorch_tanh"
    return ConfigReader(values | _rope(found), str(file)), _names(found, model_type)


def _values(file: Path) -> dict[str, Any]:
    """Return the file's keys; of the nested form of older versions those of the class that has the layers."""
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
    """Return `rope_scaling` for PaddleNLP's two keys. Its NTK scalings are not those of Hugging Face."""
    if config.expect("rope_scaling_type", (None, "linear"), None) is None:
        return {}
    return {"rope_scaling": {"type": "linear", "factor": config.positive("rope_scaling_factor", 1.0)}}


def _names(config: ConfigReader, model_type: str) -> Names:
    """Return the names of the weights, whose fused orders depend on the heads."""
    heads = config.count("n_head" if config.raw("n_head") is not None else "num_attention_heads")
    groups = config.count("multi_query_group_num" if model_type == "chatglm_v2" else "num_key_value_heads", heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    hidden = config.count("n_embed" if config.raw("n_embed") is not None else "hidden_size")
    head_dim = config.count("head_dim", max(hidden // heads, 1))
    is_tied = config.get("tie_word_embeddings", bool, False) or model_type == "gpt"
    wide = config.count("intermediate_size", 1)
    return names_of(model_type, is_tied, heads, groups, head_dim, wide)

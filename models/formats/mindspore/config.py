"""Read `model.model_config` of MindFormers' YAML as config.json keys.

Keys and defaults are from mindformers/models/llama/llama_config.py.
"""

from pathlib import Path
from typing import Any

from conf.errors import UserError
from models.config import ConfigReader

# Keys of a run, not of the model: compute dtypes, memory, parallelism.
RUN_KEYS = (
    "type batch_size compute_dtype layernorm_compute_type softmax_compute_type rotary_dtype param_init_type embedding_init_type "
    "use_past use_flash_attention use_attn_mask_compression use_rope_slice use_past_shard block_size num_blocks is_dynamic offset "
    "checkpoint_name_or_path ignore_token_id parallel_config parallel_optimizer fine_grain_interleave pp_interleave_num auto_map "
    "batch_length"
).split()
PASSED_ON = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
MOST_VALUES = 1000  # of one model: YAML aliases of aliases can make a short file very large


def read_mindformers_config(folder: Path) -> ConfigReader:
    """Read the YAML of a folder.

    Raises UserError for a missing file, a wrong type, and features that Llama and Qwen 2 do not have.
    """
    file, values = _model_config(folder)
    config = ConfigReader(values, str(file))
    config.expect("type", ("LlamaConfig",), None)
    config.expect("qkv_concat", (False, None), False)
    config.expect("quant", ("", None), "")
    config.expect("moe_config", (None,), None)
    for key in RUN_KEYS:
        config.raw(key)
    hidden_size, seq_length = config.count("hidden_size", 4096), config.count("seq_length", 2048)
    heads = config.count("num_heads", 32)
    length = config.count("max_position_embedding", config.count("max_position_embeddings", seq_length))
    translated: dict[str, Any] = {
        # A Llama with biases only on queries, keys and values is a Qwen 2.
        "model_type": "qwen2" if config.get("qkv_has_bias", bool, False) else "llama",
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(config, hidden_size),
        "num_hidden_layers": config.count("num_layers", 32),
        "num_attention_heads": heads,
        "num_key_value_heads": config.count("n_kv_heads", heads),
        "rms_norm_eps": config.positive("rms_norm_eps", 1e-5),
        "max_position_embeddings": length,
        "rope_theta": config.positive("theta", 10000.0),
        **{key: config.raw(key, default) for key, default in PASSED_ON.items()},
    }
    translated |= _rope(config, translated["rope_theta"], length)
    return ConfigReader(translated | {key: config.raw(key) for key in config.unread()}, str(file))


def _model_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    configs = []
    import yaml  # imported here, because only this function needs it

    for file in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from error
        model = content.get("model") if isinstance(content, dict) else None
        values = model.get("model_config") if isinstance(model, dict) else None
        if isinstance(values, dict):
            configs.append((file, {str(key): value for key, value in values.items()}))
            experts = content.get("moe_config")
            if isinstance(experts, dict) and experts.get("expert_num") not in (None, 1):
                configs[-1][1]["moe_config"] = experts
    if len(configs) != 1:
        names = f" (found: {', '.join(file.name for file, _ in configs)})" if configs else ""
        raise UserError(
            f"{folder} has .ckpt files, but neither config.json nor one YAML of MindFormers with model.model_config{names}"
        )
    _check_size(*configs[0])
    return configs[0]


def _check_size(file: Path, values: dict[str, Any]) -> None:
    todo: list[Any] = [values]
    for _ in range(MOST_VALUES):
        if not todo:
            return
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    raise UserError(f"{file}: model.model_config holds more than {MOST_VALUES} values")


def _intermediate_size(config: ConfigReader, hidden_size: int) -> int:
    """Return the feed-forward channels as `_concat_ffn_weight` in mindformers/models/llama/llama.py computes them."""
    multiple = config.count("multiple_of", 256)
    multiplier = config.get("ffn_dim_multiplier", float, 0.0)
    wide = int((multiplier + 0.01) * 4 * hidden_size) if multiplier else 4 * hidden_size
    return config.count("intermediate_size", -(-(2 * wide // 3) // multiple) * multiple)


def _rope(config: ConfigReader, theta: float, length: int) -> dict[str, Any]:
    """Return the rotary embedding keys as FreqsMgr in mindformers/modules/layers.py applies them."""
    method = config.expect("extend_method", ("None", None, "PI", "NTK", "LLAMA3"), "None")
    if method == "LLAMA3":
        factors = config.require("scaling_factor", dict)
        return {"rope_scaling": factors | {"rope_type": "llama3"}}
    if method in ("None", None):
        config.raw("scaling_factor")
        return {}
    factor = config.positive("scaling_factor", 1.0)
    if method == "NTK":
        return {"rope_theta": theta * factor}
    # Hugging Face's length is the length before scaling; MindFormers' is the length after it.
    return {
        "rope_scaling": {"rope_type": "linear", "factor": factor},
        "max_position_embeddings": max(1, int(length / factor)),
    }

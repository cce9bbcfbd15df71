"""Checkpoints in PaddleNLP's layout, made from Hugging Face's as PaddleNLP stores and splits them.

H query heads, G key/value heads, D channels per head. Weights of linear layers are [inputs, outputs] here.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

Arrays = dict[str, np.ndarray]
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "wpe.weight")
ROW_PARALLEL = ("c_proj", "o_proj", "down_proj", "dense", "dense_4h_to_h", "out_proj", "linear2")
WHOLE_ON_RANKS = ("norm", "position_embeddings", "ln_")
PREFIXES = {
    "llama": ("model.", "llama."),
    "qwen2": ("model.", "qwen2."),
    "qwen2_moe": ("model.", "qwen2_moe."),
    "mixtral": ("model.", "mixtral."),
    "bloom": ("transformer.", "bloom."),
    "chatglm": ("transformer.", "chatglm_v2."),
    "qwen": ("transformer.", "qwen."),
}
CONFIG = {"paddlenlp_version": "3.0.0", "tensor_parallel_degree": 1, "fuse_attention_qkv": False, "return_dict": False}


def paddle_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return PaddleNLP's config for a model with Hugging Face's config."""
    values = {**config, **CONFIG, "dtype": config.get("torch_dtype", "float32")}
    values.pop("torch_dtype", None)
    if config["model_type"] == "chatglm":
        renamed = {
            "num_layers": "num_hidden_layers",
            "padded_vocab_size": "vocab_size",
            "seq_length": "max_sequence_length",
        }
        values = {renamed.get(key, key): value for key, value in values.items()}
        values["model_type"] = "chatglm_v2"
    if config["model_type"] == "bloom":
        values["hidden_size"] = values.pop("n_embed", None) or values["hidden_size"]
    return values


def paddle_arrays(tensors: dict[str, Tensor], config: dict[str, Any]) -> Arrays:
    """Return the tensors with PaddleNLP's names and axis order."""
    before, after = PREFIXES[config["model_type"]]
    arrays = {}
    for name, tensor in tensors.items():
        renamed = after + name.removeprefix(before) if name.startswith(before) else name
        array = tensor.numpy()
        is_linear = array.ndim == 2 and name.endswith("weight") and not name.endswith(EMBEDDINGS)
        if config["model_type"] == "bloom" and not name.startswith(before):
            renamed = after + name  # saved without its head
        arrays[renamed] = np.ascontiguousarray(array.T) if is_linear else array
    return arrays


def fused(arrays: Arrays, num_groups: int) -> Arrays:
    """Fuse queries, keys and values by key/value head, and gate and up: fuse_attention_qkv, fuse_attention_ffn."""
    result = dict(arrays)
    for name in [name for name in arrays if ".q_proj." in name]:
        q, k, v = (result.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj"))
        grouped = [part.reshape(*part.shape[:-1], num_groups, -1) for part in (q, k, v)]
        result[name.replace("q_proj", "qkv_proj")] = np.concatenate(grouped, -1).reshape(*q.shape[:-1], -1)
    for name in [name for name in arrays if ".gate_proj." in name]:
        gate, up = (result.pop(name.replace("gate_proj", part)) for part in ("gate_proj", "up_proj"))
        result[name.replace("gate_proj", "gate_up_fused_proj")] = np.concatenate([gate, up], -1)
    return result


def rank_of(arrays: Arrays, rank: int, num_ranks: int, sections: dict[str, tuple[int, ...]]) -> Arrays:
    """Return a rank's part. `sections`: by module, the widths of the parts of a fused matrix that are split
    separately."""

    def part(name: str, array: np.ndarray) -> np.ndarray:
        module = name.split(".")[-2]
        if any(word in name for word in WHOLE_ON_RANKS) and not name.endswith("word_embeddings.weight"):
            return array
        if name.endswith(EMBEDDINGS):
            return np.split(array, num_ranks, 0)[rank]
        if module in ROW_PARALLEL:
            return np.split(array, num_ranks, 0)[rank] if array.ndim == 2 else array
        ends = np.cumsum(sections.get(module, (array.shape[-1],)))[:-1]
        pieces = [np.split(piece, num_ranks, -1)[rank] for piece in np.split(array, ends, -1)]
        return np.concatenate(pieces, -1)

    return {name: np.ascontiguousarray(part(name, array)) for name, array in arrays.items()}


def save_pdparams(path: Path, arrays: Arrays, protocol: int = 4) -> None:
    """Save as paddle.save does with a state dictionary."""
    names = {name: f"linear_{i}.w_0" for i, name in enumerate(arrays)}
    path.write_bytes(pickle.dumps({**arrays, "StructuredToParameterName@@": names}, protocol=protocol))


def write_paddle(folder: Path, golden: Path, **changes: Any) -> tuple[Arrays, dict[str, Any]]:
    """Write the config of a Hugging Face folder's twin. Return its arrays and that config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((golden / "config.json").read_text())
    written = paddle_config(config) | changes
    (folder / "config.json").write_text(json.dumps(written))
    return paddle_arrays(load_file(golden / "model.safetensors"), config), written


def save_safetensors(path: Path, arrays: Arrays) -> None:
    save_file(arrays, path, {"format": "np"})

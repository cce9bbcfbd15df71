"""Checkpoints in Meta's Llama layout, made from Hugging Face's."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.builders import write_llama
from tests.helpers.mindspore_files import NAMES

PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "multiple_of": 8,
    "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": -1,
}
SAME = {
    "intermediate_size": 224,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}  # int(1.3 * int(8 * 64 / 3)) = 221, rounded up to a multiple of 8


def meta_name(name: str) -> str:
    known = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    module = name.removesuffix(".weight")
    if module in known:
        return f"{known[module]}.weight"
    _, _, layer, rest = module.split(".", 3)
    return f"layers.{layer}.{NAMES[rest]}.weight"


def to_neighbours(tensor: Tensor, heads: int) -> Tensor:
    """Interleave a head's halves by indices: row i of the first half becomes row 2i, row i of the second half row 2i +
    1."""
    half = tensor.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return tensor[order]


def cut(name: str, tensor: Tensor, shard: int, num_shards: int, embedding: int) -> Tensor:
    if "norm" in name:
        return tensor.clone()
    dim = embedding if name.startswith("tok") else int(".wo." in name or ".w2." in name)
    return tensor.chunk(num_shards, dim)[shard].clone()


def write_meta(folder: Path, tensors: dict[str, Tensor], num_shards: int, embedding: int = 0, **params: Any) -> Path:
    folder.mkdir(exist_ok=True)
    groups = {"q_proj": 4, "k_proj": 2}
    turned = {
        meta_name(name): to_neighbours(tensor, groups[part]) if (part := name.split(".")[-2]) in groups else tensor
        for name, tensor in tensors.items()
    }
    for shard in range(num_shards):
        content = {name: cut(name, tensor, shard, num_shards, embedding) for name, tensor in turned.items()}
        torch.save(content | {"rope.freqs": torch.ones(8)}, folder / f"consolidated.{shard:02}.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | params))
    return folder


def tensors_of(folder: Path, **config: Any) -> dict[str, Tensor]:
    """Return Meta's tensors. Writes the same model in Hugging Face's layout."""
    folder.mkdir()
    write_llama(folder, **SAME, **config)
    return load_file(folder / "model.safetensors")

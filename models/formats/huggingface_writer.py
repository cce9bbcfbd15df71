"""Write Hugging Face's layout: weights in files of a limited size, config.json and the tokenizer's files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from models.formats.base import Checkpoint, WeightFile
from models.formats.huggingface import CONFIG, GENERATION_CONFIG, WEIGHTS
from models.formats.safetensors_writer import Entry, SafetensorsWriter, content_of, entries_of, read_in_order
from models.formats.sentence_transformers import copy_embedding_files
from models.tokenizers import TOKENIZER_FILES


def write_huggingface(
    files: list[WeightFile], folder: Path, max_shard_bytes: int, on_bytes: Callable[[int, int], None]
) -> dict[str, str]:
    """Write model.safetensors, or files of at most `max_shard_bytes` (a file of a single tensor may be larger) and their index.

    Returns the sha256 of each weight file. `on_bytes(done, total)` is called after every tensor.
    """
    shards = _shards(entries_of(files), max_shard_bytes)
    total, done = sum(entry.nbytes for shard in shards for entry in shard), 0
    sha256 = {}
    for i, shard in enumerate(shards):
        name = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        with SafetensorsWriter(folder / name, shard) as writer:
            for _, tensor in read_in_order(files, shard):
                writer.write(content_of(tensor))
                done += tensor.nbytes
                on_bytes(done, total)
                del tensor  # before the next is read
        sha256[name] = writer.sha256
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(sha256, shards, strict=True) for entry in shard}
        _write_json(folder / f"{WEIGHTS}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sha256


def write_companions(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json (with `dtype` where tensors were cast to it) and generation_config.json.

    The tokenizer's files, and those that say how vectors are meant, are copied.
    A tokenizer that was inside the model's file gets files of its own.
    """
    config = checkpoint.config.values
    if dtype is not None:
        keys = [key for key in ("torch_dtype", "dtype") if key in config] or ["torch_dtype"]
        config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    _write_json(folder / CONFIG, config)
    if checkpoint.generation_config:
        _write_json(folder / GENERATION_CONFIG, checkpoint.generation_config)
    if checkpoint.path.is_file() and (tokenizer := checkpoint.load_tokenizer()):
        tokenizer.save(folder)
    for pattern in TOKENIZER_FILES:
        for file in filter(Path.is_file, checkpoint.path.glob(pattern)):
            copy = folder / file.relative_to(checkpoint.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    copy_embedding_files(checkpoint.path, folder)


def _shards(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _write_json(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

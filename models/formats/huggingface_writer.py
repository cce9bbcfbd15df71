"""Write Hugging Face's layout: weight files of limited size, config.json and the tokenizer files."""

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
    """Write model.safetensors, or shards of at most `max_shard_bytes` and their index.

    Returns the sha256 of each weight file. A shard with a single tensor may be larger. Calls `on_bytes(done, total)`
    after every tensor.
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
                del tensor  # frees it before the next one is read
        sha256[name] = writer.sha256
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(sha256, shards, strict=True) for entry in shard}
        _write_json(folder / f"{WEIGHTS}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sha256


def write_companions(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, and copy the tokenizer files and the sentence-transformers files.

    `dtype`: the dtype to which tensors were cast, which config.json then names; None: they were not cast. If the
    checkpoint is one file, its tokenizer is saved as separate files.
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

"""Write our own layout: a file for each rank with all that it reads, and layout.json (`models/formats/sharded.py`)."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.collectives import Alone
from models.causal_lm import CausalLM
from models.formats.base import WeightFile
from models.formats.safetensors_writer import Entry, SafetensorsWriter, content_of, entries_of, read_in_order
from models.formats.sharded import LAYOUT, VERSION, rank_file
from models.formats.sliced import slice_shard
from models.parallel import shard_model
from models.sharding import ParallelLayout, Shard
from models.weights import expected_shapes

RankShards: TypeAlias = list[list[dict[str, Shard | None]]]
"""By stage and rank: the tensors of a file, and their shards. None: the whole tensor."""


def divide_tensors(
    model: CausalLM, names: Mapping[str, str | None], tp: int, pp: int, dtype: torch.dtype
) -> RankShards:
    """Return which tensors of a checkpoint each rank holds, and its shard of each.

    `model`: the whole model on the meta device, with the checkpoint's layers; it does not change. `names`: the model's
    names by the checkpoint's names. A tensor that no rank reads has None, and goes to the first rank. `dtype`: of the
    model; the bytes in this dtype determine the pipeline stages. Raises UserError as `shard_model` does.
    """
    stage_names = []
    for stage in range(pp):
        shard_model(part := deepcopy(model), ParallelLayout(1, pp, 0, stage), Alone(), dtype)
        stage_names.append(expected_shapes(part).keys())
    rank_shards = [shard_model(deepcopy(model), ParallelLayout(tp, 1, rank), Alone(), dtype) for rank in range(tp)]
    shards_by_rank: RankShards = [
        [
            {name: shards.get(model_name) for name, model_name in names.items() if model_name in stage_tensors}
            for shards in rank_shards
        ]
        for stage_tensors in stage_names
    ]
    shards_by_rank[0][0] |= {name: None for name in names if not any(name in ranks[0] for ranks in shards_by_rank)}
    return shards_by_rank


def write_sharded(
    files: list[WeightFile], folder: Path, shards_by_rank: RankShards, on_bytes: Callable[[int, int], None]
) -> dict[str, str]:
    """Write a file for each rank in `shards_by_rank`, and layout.json. Return the sha256 of each weight file.

    Calls `on_bytes(done, total)` after every tensor that is read.
    """
    stage_entries = [
        [entry for entry in entries_of(files) if any(entry.name in shards for shards in ranks)]
        for ranks in shards_by_rank
    ]
    total, done = sum(entry.nbytes for entries in stage_entries for entry in entries), 0
    sha256: dict[str, str] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for stage, (ranks, entries) in enumerate(zip(shards_by_rank, stage_entries, strict=True)):
        with ExitStack() as stack:
            writers = [
                stack.enter_context(SafetensorsWriter(folder / rank_file(stage, rank), _parts(entries, shards)))
                for rank, shards in enumerate(ranks)
            ]
            for name, tensor in read_in_order(files, entries):
                _write(tensor, name, list(zip(writers, ranks, strict=True)), tensors)
                done += tensor.nbytes
                on_bytes(done, total)
                del tensor  # frees it before the next one is read
        sha256 |= {writer.path.name: writer.sha256 for writer in writers}
    head = json.dumps({"version": VERSION, "tp": len(shards_by_rank[0]), "pp": len(shards_by_rank)})[:-1]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in tensors.items())
    (folder / LAYOUT).write_text(f'{head}, "tensors": {{\n{lines}\n}}}}\n', encoding="utf-8")
    return sha256


def _parts(entries: list[Entry], shards: Mapping[str, Shard | None]) -> list[Entry]:
    rank_entries = [(entry, shards[entry.name]) for entry in entries if entry.name in shards]
    return [
        Entry(entry.name, entry.dtype, shard.shape(entry.shape) if shard else entry.shape)
        for entry, shard in rank_entries
    ]


def _write(
    tensor: Tensor,
    name: str,
    ranks: list[tuple[SafetensorsWriter, dict[str, Shard | None]]],
    tensors: dict[str, dict[str, Any]],
) -> None:
    """Write a tensor's pieces into the files of a stage, and add them to its entry in layout.json."""
    owners = [(writer, shards[name]) for writer, shards in ranks if name in shards]
    dtype, axis = str(tensor.dtype).removeprefix("torch."), owners[0][1].axis if owners[0][1] else None
    entry = tensors.setdefault(name, {"shape": [*tensor.shape], "dtype": dtype, "axis": axis, "pieces": []})
    for writer, shard in owners:
        writer.write(content := content_of(tensor if shard is None else slice_shard(tensor, shard)))
        ranges = None if shard is None else [[indices.start, indices.stop] for indices in shard.ranges]
        piece = next((piece for piece in entry["pieces"] if piece["ranges"] == ranges), None)
        if piece is None:
            piece = {"ranges": ranges, "files": [], "sha256": hashlib.sha256(content).hexdigest()}
            entry["pieces"].append(piece)
        piece["files"].append(writer.path.name)

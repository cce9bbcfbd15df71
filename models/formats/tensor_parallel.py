"""Read the slices of tensor-parallel ranks with Hugging Face's names.

The files are rank_0/*.safetensors, rank_1/*.safetensors, ..., or vLLM's sharded_state: model-rank-0-part-0.safetensors,
... (vllm/model_executor/model_loader/sharded_state_loader.py). vLLM holds a rank's queries, keys and values as one
matrix, and its gate and up projections as another; this module splits them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.base import Checkpoint, ExpectedTensors, WeightFile
from models.formats.huggingface import SafetensorsFile, open_huggingface
from models.formats.ranks import JoinedRanks, in_order, rank_folders

VLLM = re.compile(r"model-rank-(0|[1-9][0-9]{0,4})-part-(0|[1-9][0-9]{0,4})\.safetensors")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def is_tensor_parallel(folder: Path) -> bool:
    """Return whether a folder has slices of ranks and no whole weights; whole weights take precedence."""
    whole_files = ("model.safetensors", "model.safetensors.index.json")
    if not (folder / "config.json").is_file() or any((folder / name).is_file() for name in whole_files):
        return False
    return any(VLLM.fullmatch(file.name) for file in folder.iterdir()) or bool(rank_folders(folder, "*.safetensors"))


def open_tensor_parallel(folder: Path, allow_pickle: bool) -> Checkpoint:
    return replace(open_huggingface(folder, allow_pickle), open_weights=partial(open_ranks, folder))


def open_ranks(folder: Path, expected: ExpectedTensors) -> list[WeightFile]:
    """Open all ranks as one file.

    Raises UserError if a file is missing or damaged, or if slices do not fit the expected shapes.
    """
    paths = _rank_files(folder)
    files = [[SafetensorsFile(path) for path in rank] for rank in paths]
    # vLLM stores only the first name of tensors that share memory.
    head_is_embedding = HEAD not in expected and not any(EMBEDDING in file.shapes for rank in files for file in rank)
    names = {HEAD: EMBEDDING} if head_is_embedding else {}
    ranks = [[Unfused(file, len(files), expected, names) for file in rank] for rank in files]
    return [JoinedRanks(folder / paths[0][0].name, ranks, expected)]


def _rank_files(folder: Path) -> list[list[Path]]:
    parts: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := VLLM.fullmatch(path.name):
            parts.setdefault(int(match[1]), {})[int(match[2])] = path
    ranks = in_order(parts, f"{folder}: model-rank-{{}}-part-0.safetensors")
    if ranks:
        return [in_order(parts, f"{folder}: model-rank-{i}-part-{{}}.safetensors") for i, parts in enumerate(ranks)]
    return [sorted(rank.glob("*.safetensors")) for rank in rank_folders(folder, "*.safetensors")]


class Unfused:
    """A rank's file with fused matrices split into views of their parts.

    Matrices that the model fuses too stay whole.
    """

    def __init__(self, file: SafetensorsFile, num_ranks: int, expected: ExpectedTensors, names: dict[str, str]) -> None:
        self.path = file.path
        self.is_mapped = file.is_mapped
        self._file = file
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._sources: dict[str, tuple[str, int]] = {}  # tensor name: name in the file, first row there
        for source, shape in file.shapes.items():
            start = 0
            for name, rows in self._parts(names.get(source, source), shape, num_ranks, expected):
                if name in self.shapes:
                    raise UserError(f"{self.path} has {name} twice: as a tensor of its own and in a fused one")
                self.shapes[name] = (rows, *shape[1:]) if shape else shape
                self.dtypes[name] = file.dtypes[source]
                self._sources[name] = source, start
                start += rows

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            source, start = self._sources[name]
            for _, tensor in self._file.read([source]):
                yield name, tensor.narrow(0, start, self.shapes[name][0]) if tensor.ndim else tensor

    def _parts(
        self, source: str, shape: tuple[int, ...], num_ranks: int, expected: ExpectedTensors
    ) -> list[tuple[str, int]]:
        rows = shape[0] if shape else 1
        prefix, _, leaf = source.rpartition(".")
        prefix, _, module = prefix.rpartition(".")
        names = [f"{prefix}.{part}.{leaf}" for part in FUSED.get(module, ())]
        if not names or names[0] not in expected:
            return [(source, rows)]
        # Ranks shard the queries evenly. Keys and values, which several ranks may share, are equal halves of the rest.
        first = expected[names[0]].shape[0] // num_ranks if module == "qkv_proj" else rows // 2
        rest = (rows - first) // (len(names) - 1)
        if first < 1 or rest < 1 or first + rest * (len(names) - 1) != rows:
            raise UserError(
                f"{self.path}: {source} is {list(shape)}, which cannot be divided into {', '.join(names)} of {num_ranks} ranks"
            )
        return [(names[0], first), *((name, rest) for name in names[1:])]

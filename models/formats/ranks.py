"""Join the slices of tensors that several ranks hold, one tensor at a time, while they are read.

A rank holds the tensors of its pipeline stage. For each tensor, it holds one of:
    a slice: tensor parallelism shards a matrix's rows or columns (arXiv 1909.08053)
    all of it
    the same slice as other ranks: fewer key/value heads than ranks, or data parallelism
The stored shape, and the shape and axes that the model expects, determine the case; nothing is guessed.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from conf.errors import UserError
from models.formats.base import ExpectedTensor, ExpectedTensors, WeightFile

T = TypeVar("T")

RANK_FOLDER = re.compile(r"rank_(0|[1-9][0-9]{0,4})")
LISTED = 4  # tensors named in an error


def rank_folders(folder: Path, pattern: str) -> list[Path]:
    """Return the subfolders rank_0, rank_1, ... with files that match the pattern, in order.

    Raises UserError if one is missing.
    """
    folders = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := RANK_FOLDER.fullmatch(path.name)) and any(path.glob(pattern))
    }
    return in_order(folders, f"{folder}: rank_{{}}/{pattern}")


def in_order(items: dict[int, T], name: str) -> list[T]:
    """Return the values of 0, 1, ... Raises UserError with `name.format(number)` for the first missing number."""
    for i in range(len(items)):
        if i not in items:
            numbers = ", ".join(map(str, sorted(items)[:LISTED]))
            raise UserError(f"{name.format(i)} is missing (found: {numbers}{', ...' * (len(items) > LISTED)})")
    return [items[i] for i in range(len(items))]


@dataclass(frozen=True)
class Slices:
    files: list[WeightFile]
    """One for each rank that holds the tensor, in order."""
    dim: int | None
    """The sharded axis; None: every rank holds all of it."""
    count: int
    """Number of different slices. If there are more files, some slices are stored more than once."""


class JoinedRanks:
    """All ranks as one file. Raises UserError with the tensors whose slices do not form the expected tensor."""

    is_mapped = False

    def __init__(self, path: Path, ranks: Sequence[Sequence[WeightFile]], expected: ExpectedTensors) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._slices: dict[str, Slices] = {}
        faults: list[str] = []
        for name, files in _holders(ranks).items():
            shape = files[0].shapes[name]
            expected_tensor = expected.get(name, ExpectedTensor(shape))  # a later comparison rejects unexpected tensors
            self.shapes[name] = expected_tensor.shape
            self.dtypes[name] = files[0].dtypes[name]
            slices = _match_slices(name, files, expected_tensor)
            if slices is None:
                differing = next((file for file in files if file.shapes[name] != shape), files[0])
                faults.append(
                    f"{differing.path}: {name} is {list(differing.shapes[name])}, one of {len(files)} slices, "
                    f"expected {list(self.shapes[name])} or its tensor-parallel slices"
                )
            else:
                self._slices[name] = slices
        if faults:
            more = f" and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
            raise UserError("; ".join(faults[:LISTED]) + more)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            slices = self._slices[name]
            if slices.dim is None:
                tensor = _read_tensor(slices.files[0], name)
                yield name, tensor.clone() if slices.files[0].is_mapped else tensor
            else:
                yield name, self._join(name, slices, slices.dim)

    def _join(self, name: str, slices: Slices, dim: int) -> Tensor:
        tensors = (_read_tensor(file, name) for file in slices.files)
        if slices.count < len(slices.files):
            tensors = (tensor for tensor in self._without_copies(name, list(tensors), slices.count))
        joined, at = torch.empty(0), 0
        for part in tensors:  # one by one: memory holds the joined tensor and one slice
            if at == 0:
                joined = part.new_empty(self.shapes[name])
            if part.dtype != joined.dtype:
                raise UserError(f"{self.path}: slices of {name} are {joined.dtype} and {part.dtype}")
            joined.narrow(dim, at, part.shape[dim]).copy_(part)
            at += part.shape[dim]
        return joined

    def _without_copies(self, name: str, tensors: list[Tensor], count: int) -> list[Tensor]:
        """Return one tensor for each different slice.

        Copies are adjacent (key/value heads held by several ranks) or `count` apart (data parallelism); equal bytes
        show which.
        """
        repeats = len(tensors) // count
        adjacent = [tensors[i * repeats : (i + 1) * repeats] for i in range(count)]
        strided = [tensors[i::count] for i in range(count)]
        for groups in (adjacent, strided):
            if all(_same_bytes(group[0], copy) for group in groups for copy in group[1:]):
                return [group[0] for group in groups]
        raise UserError(
            f"{self.path}: {name} has {len(tensors)} slices, {count} are expected, and they are not copies of each other: "
            "slices of optimizer parallelism are not supported, join them first"
        )


def _holders(ranks: Sequence[Sequence[WeightFile]]) -> dict[str, list[WeightFile]]:
    holders: dict[str, list[WeightFile]] = {}
    for files in ranks:
        rank_files: dict[str, WeightFile] = {}
        for file in files:
            for name in file.shapes:
                if name in rank_files:
                    raise UserError(f"{file.path} and {rank_files[name].path.name} of the same rank both hold {name}")
                rank_files[name] = file
        for name, file in rank_files.items():
            holders.setdefault(name, []).append(file)
    return holders


def _match_slices(name: str, files: list[WeightFile], expected: ExpectedTensor) -> Slices | None:
    """Return how the files' slices form the expected tensor; None if they do not."""
    shape, expected_shape = files[0].shapes[name], expected.shape
    if len(shape) != len(expected_shape) or any(file.shapes[name] != shape for file in files):
        return None
    differing = [dim for dim in range(len(shape)) if shape[dim] != expected_shape[dim]]
    if not differing:
        return Slices(files, None, 1)
    dim = differing[0]
    if len(differing) > 1 or dim not in expected.shard_axes or shape[dim] < 1 or expected_shape[dim] % shape[dim]:
        return None
    count = expected_shape[dim] // shape[dim]
    return None if len(files) % count else Slices(files, dim, count)


def _read_tensor(file: WeightFile, name: str) -> Tensor:
    return next(iter(file.read([name])))[1]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether bytes are equal. Unlike torch.equal, NaN equals NaN."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

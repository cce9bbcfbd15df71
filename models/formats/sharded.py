"""Read our own layout: a safetensors file for each pipeline- and tensor-parallel rank, and their index layout.json.

    {"version": 2, "tp": 2, "pp": 1, "tensors": {
      "lm_head.weight": {"shape": [96, 64], "dtype": "float32", "axis": 0, "pieces": [
        {"ranges": [[0, 48]], "files": ["rank_0_0.safetensors"], "sha256": "..."},
        {"ranges": [[48, 96]], "files": ["rank_0_1.safetensors"], "sha256": "..."}]},
      "model.norm.weight": {"shape": [64], "dtype": "float32", "axis": null, "pieces": [
        {"ranges": null, "files": ["rank_0_0.safetensors", "rank_0_1.safetensors"], "sha256": "..."}]}, ...}}

A piece is the concatenation of index ranges along the tensor's axis, or the whole tensor. Pieces may have different
sizes and may overlap. Each file in `files` holds the piece. rank_<stage>_<rank>.safetensors has everything that this
rank reads in the same parallel layout. sha256 is the hash of the piece's bytes. In version 1 a tensor has equal pieces,
one for each rank, or one piece. The folder also has config.json and the tokenizer files, as in Hugging Face's layout.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.base import Checkpoint
from models.formats.huggingface import GENERATION_CONFIG, SafetensorsFile
from models.sharding import ParallelLayout, Shard
from models.tokenizers import load_tokenizer

LAYOUT = "layout.json"
VERSION = 2


def is_sharded_layout(folder: Path) -> bool:
    return (folder / LAYOUT).is_file()


def open_sharded(folder: Path) -> Checkpoint:
    return Checkpoint(
        folder,
        ConfigReader.from_folder(folder),
        read_json(folder / GENERATION_CONFIG),
        lambda expected: [ShardedFile(folder)],
        partial(load_tokenizer, folder),
    )


def rank_file(stage: int, rank: int) -> str:
    return f"rank_{stage}_{rank}.safetensors"


@dataclass(frozen=True)
class Piece:
    """A part of a tensor."""

    ranges: tuple[range, ...] | None
    """Indices along the tensor's axis; None: the whole tensor."""
    files: tuple[str, ...]
    """The files that hold the piece."""


@dataclass(frozen=True)
class Span:
    """Consecutive indices of a tensor, and their start in a file's piece of it."""

    indices: range
    file: str
    start: int


class ShardedFile:
    """The files of all ranks as one.

    Memory holds the requested part of one tensor, and the mapped pages of one piece.
    """

    is_mapped = False

    def __init__(self, folder: Path) -> None:
        """Raises UserError if layout.json and the files disagree."""
        self.path = folder / LAYOUT
        layout = ConfigReader.from_folder(folder, LAYOUT)
        layout.expect("version", (1, VERSION), None)
        self._version, self._tp, self._pp = (layout.count(name) for name in ("version", "tp", "pp"))
        self._files: dict[str, SafetensorsFile] = {}
        self._preferred_file = ""
        self._axes: dict[str, int | None] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, values in layout.require("tensors", dict).items():
            if not isinstance(values, dict):
                raise UserError(f"{self.path}: {name} is not an object")
            self._add(name, ConfigReader(values, f"{self.path}: {name}"))
        listed = {(file, name) for name, pieces in self._pieces.items() for piece in pieces for file in piece.files}
        for file, opened in self._files.items():
            if unlisted := next((name for name in opened.shapes if (file, name) not in listed), None):
                raise UserError(f"{opened.path} holds {unlisted}, which {LAYOUT} does not list for this file")

    def of_rank(self, parallel_layout: ParallelLayout) -> "ShardedFile":
        """Return this file for one rank, which reads from its own rank file where possible.

        In another parallel layout the rank has no file of its own.
        """
        rank_view = copy(self)
        if (parallel_layout.tp, parallel_layout.pp) == (self._tp, self._pp):
            rank_view._preferred_file = rank_file(parallel_layout.stage, parallel_layout.tp_rank)
        return rank_view

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            if shape := self.shapes[name]:
                axis = self._axes[name] or 0
                yield name, self.read_ranges(name, Shard(axis, (range(shape[axis]),)))
            else:
                files = self._pieces[name][0].files
                file = self._preferred_file if self._preferred_file in files else files[0]
                yield name, next(self._files[file].read([name]))[1].clone()

    def read_ranges(self, name: str, shard: Shard) -> Tensor:
        shape, axis = self.shapes[name], self._axes[name]
        axis = shard.axis if axis is None else axis
        ranges = shard.ranges if axis == shard.axis else (range(shape[axis]),)
        part, at = torch.empty(shard.shape(shape), dtype=self.dtypes[name]), 0
        for span in (span for indices in ranges for span in self._spans(name, indices)):
            (_, piece) = next(self._files[span.file].read([name]))  # a view: only copied pages are loaded
            source = piece.narrow(axis, span.start, len(span.indices))
            target = part.narrow(axis, at, len(span.indices))
            at += len(span.indices)
            if axis == shard.axis:
                target.copy_(source)
                continue
            start = 0
            for indices in shard.ranges:
                target.narrow(shard.axis, start, len(indices)).copy_(
                    source.narrow(shard.axis, indices.start, len(indices))
                )
                start += len(indices)
        return part

    def _spans(self, name: str, indices: range) -> Iterator[Span]:
        """Yield the positions of the indices in the files, in order.

        Prefers the rank's own file, then the file with the longest consecutive range.
        """
        while indices:
            span = max(
                (
                    Span(range(indices.start, min(held.stop, indices.stop)), file, start + indices.start - held.start)
                    for piece in self._pieces[name]
                    for start, held in _ranges_with_starts(piece, indices)
                    if indices.start in held
                    for file in piece.files
                ),
                key=lambda span: (span.file == self._preferred_file, len(span.indices)),
            )
            yield span
            indices = range(span.indices.stop, indices.stop)

    def _add(self, name: str, entry: ConfigReader) -> None:
        """Check a tensor's entry against the files.

        They must hold all of it, so that an entry cannot claim more than exists.
        """
        shape, axis, pieces = entry.raw("shape"), entry.raw("axis"), entry.raw("pieces")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise UserError(f"{self.path}: {name}: shape={shape!r} is not a list of sizes")
        if axis is not None and (type(axis) is not int or not 0 <= axis < len(shape)):
            raise UserError(f"{self.path}: {name}: axis={axis!r} is not an axis of shape {shape}, or null")
        if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
            raise UserError(f"{self.path}: {name}: pieces is not a list of objects")
        size = None if axis is None else shape[axis]
        if self._version == 1:
            read = _equal_pieces(pieces, size, self._tp, f"{self.path}: {name}")
        else:
            read = [_piece(piece, size, f"{self.path}: {name}") for piece in pieces]
            _check_whole(read, size, f"{self.path}: {name}")
        dtype = entry.require("dtype", str)
        for piece in read:
            tensor_shape = tuple(shape)
            piece_shape = (
                tensor_shape if axis is None or piece.ranges is None else Shard(axis, piece.ranges).shape(tensor_shape)
            )
            for file in piece.files:
                self._check(name, self._open(name, file), piece_shape, dtype)
        self.shapes[name], self._axes[name], self._pieces[name] = tuple(shape), axis, read

    def _check(self, name: str, opened: SafetensorsFile, shape: tuple[int, ...], dtype: str) -> None:
        actual = (opened.shapes.get(name), str(opened.dtypes.get(name)))
        if actual != (shape, f"torch.{dtype}"):
            has = f"{actual[1]} {list(actual[0])}" if actual[0] is not None else "nothing"
            raise UserError(f"{opened.path} has {has} as {name}, but {LAYOUT} says torch.{dtype} {list(shape)}")
        self.dtypes[name] = opened.dtypes[name]

    def _open(self, name: str, file: str) -> SafetensorsFile:
        if file not in self._files:
            if Path(file).name != file:
                raise UserError(f"{self.path}: {name}: file={file!r} is not a file of its own folder")
            if not (self.path.parent / file).is_file():
                raise UserError(f"{self.path} names {file}, which is missing")
            self._files[file] = SafetensorsFile(self.path.parent / file)
        return self._files[file]


def _ranges_with_starts(piece: Piece, indices: range) -> Iterator[tuple[int, range]]:
    """Yield the ranges of a piece, each with its start in the piece.

    If the piece is the whole tensor, yields `indices` unchanged.
    """
    if piece.ranges is None:
        yield indices.start, indices
        return
    start = 0
    for part in piece.ranges:
        yield start, part
        start += len(part)


def _piece(values: dict[str, Any], size: int | None, where: str) -> Piece:
    """Return a piece of version 2. `size`: length of the axis; None: the tensor is not sharded. Raises UserError."""
    files, ranges = values.get("files"), values.get("ranges")
    if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
        raise UserError(f"{where}: files={files!r} is not a list of the files that have the piece")
    if size is None:
        if ranges is not None:
            raise UserError(f"{where}: ranges={ranges!r}, but the tensor has no axis: expected null")
        return Piece(None, tuple(files))
    if not isinstance(ranges, list) or not all(_is_range(entry, size) for entry in ranges):
        raise UserError(f"{where}: ranges={ranges!r} is not a list of [start, stop] within {size}")
    return Piece(tuple(range(*entry) for entry in ranges), tuple(files))


def _is_range(values: Any, size: int) -> bool:
    is_pair = isinstance(values, list) and len(values) == 2 and all(type(value) is int for value in values)
    return is_pair and 0 <= values[0] <= values[1] <= size


def _check_whole(pieces: list[Piece], size: int | None, where: str) -> None:
    if size is None:
        if len(pieces) != 1:
            raise UserError(f"{where}: {len(pieces)} pieces, but the tensor has no axis: expected 1")
        return
    end = 0
    for part in sorted((part for piece in pieces for part in piece.ranges or ()), key=lambda part: part.start):
        if part.start > end:
            break
        end = max(end, part.stop)
    if end < size or not pieces:
        raise UserError(f"{where}: no piece has index {end} of {size}")


def _equal_pieces(pieces: list[dict[str, Any]], size: int | None, tp: int, where: str) -> list[Piece]:
    """Return the pieces of version 1. Raises UserError unless there is one for each rank, or one for all ranks."""
    ranks, files = [piece.get("ranks") for piece in pieces], [piece.get("file") for piece in pieces]
    number = len(pieces)
    if size is not None:
        is_complete = number == tp and ranks == [[rank] for rank in range(number)]
    else:
        all_ranks = ranks[0] if number == 1 else None
        is_complete = isinstance(all_ranks, list) and len(all_ranks) == tp and all_ranks == [*range(len(all_ranks))]
    if not is_complete or len({str(file) for file in files}) < number:
        raise UserError(f"{where}: expected one piece for each of tp={tp} ranks, each in its own file")
    if wrong := [file for file in files if not isinstance(file, str)]:
        raise UserError(f"{where}: file={wrong[0]!r} is not a file of its own folder")
    if size is None:
        return [Piece(None, (str(files[0]),))]
    if size % tp:
        raise UserError(f"{where}: the axis of size {size} is not a multiple of tp={tp}")
    part = size // tp
    return [Piece((range(i * part, (i + 1) * part),), (str(file),)) for i, file in enumerate(files)]

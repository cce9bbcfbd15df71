"""Read and write our own layout: a safetensors file for each rank of pipeline and tensor parallelism, and layout.json, their index.

    {"version": 1, "tp": 2, "pp": 1, "tensors": {
      "lm_head.weight": {"shape": [96, 64], "dtype": "float32", "stage": 0, "axis": 0, "pieces": [
        {"ranks": [0], "file": "rank_0_0.safetensors", "sha256": "..."}, {"ranks": [1], "file": "rank_0_1.safetensors", "sha256": "..."}]},
      "model.norm.weight": {"shape": [64], "dtype": "float32", "stage": 0, "axis": null, "pieces": [
        {"ranks": [0, 1], "file": "rank_0_0.safetensors", "sha256": "..."}]}, ...}}

A tensor is in equal pieces along its axis, in the order of the ranks, or whole in one file for all of them; sha256 is of a piece's bytes.
Readers get whole tensors, joined from mapped files, so that any division can be converted into any other. config.json and the tokenizer's
files are beside them, as in Hugging Face's layout.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader, read_json
from models.formats.base import Checkpoint, WeightFile
from models.formats.huggingface import GENERATION_CONFIG, SafetensorsFile
from models.formats.partition import Place
from models.formats.safetensors_writer import Entry, SafetensorsWriter, content_of, entries_of, read_in_order
from models.tokenizers import load_tokenizer

LAYOUT = "layout.json"
VERSION = 1


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


class ShardedFile:
    """The files of all ranks as one. One whole tensor is in memory, beside the mapped pages of one piece."""

    is_mapped = False

    def __init__(self, folder: Path) -> None:
        """Raises UserError where layout.json and the files do not agree."""
        self.path = folder / LAYOUT
        layout = ConfigReader.from_folder(folder, LAYOUT)
        layout.expect("version", (VERSION,), None)
        self._tp = layout.count("tp")
        self._files: dict[str, SafetensorsFile] = {}
        self._pieces: dict[str, tuple[int | None, list[str]]] = {}  # axis, and the names of the files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, values in layout.require("tensors", dict).items():
            if not isinstance(values, dict):
                raise UserError(f"{self.path}: {name} is not an object")
            self._add(name, ConfigReader(values, f"{self.path}: {name}"))
        listed = {(file, name) for name, (_, files) in self._pieces.items() for file in files}
        for file, opened in self._files.items():
            if unlisted := next((name for name in opened.shapes if (file, name) not in listed), None):
                raise UserError(f"{opened.path} holds {unlisted}, which {LAYOUT} does not list there")

    def _add(self, name: str, entry: ConfigReader) -> None:
        """Check a tensor's entry against the files. Each piece has a file of its own, so an entry cannot ask for more than exists."""
        shape, axis, pieces = entry.raw("shape"), entry.raw("axis"), entry.raw("pieces")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise UserError(f"{self.path}: {name}: shape={shape!r} is not a list of sizes")
        if axis is not None and (type(axis) is not int or not 0 <= axis < len(shape)):
            raise UserError(f"{self.path}: {name}: axis={axis!r} is not an axis of shape {shape}, or null")
        if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
            raise UserError(f"{self.path}: {name}: pieces is not a list of objects")
        ranks, count = [piece.get("ranks") for piece in pieces], len(pieces)
        if axis is None:
            is_complete = count == 1 and isinstance(ranks[0], list) and ranks[0] == [*range(len(ranks[0]))]
            is_complete = is_complete and len(ranks[0]) == self._tp
        else:
            is_complete = count == self._tp and ranks == [[rank] for rank in range(count)]
        files = [piece.get("file") for piece in pieces]
        if not is_complete or len({str(file) for file in files}) < count:
            raise UserError(
                f"{self.path}: {name}: its pieces are not one for each of tp={self._tp} ranks in a file of its own"
            )
        if axis is not None and shape[axis] % count:
            raise UserError(f"{self.path}: {name}: axis {axis} of shape {shape} is not divided by tp={self._tp}")
        piece_shape = tuple(size // count if i == axis else size for i, size in enumerate(shape))
        dtype = entry.require("dtype", str)
        for file in files:
            opened = self._open(name, file)
            found = (opened.shapes.get(name), str(opened.dtypes.get(name)))
            if found != (piece_shape, f"torch.{dtype}"):
                has = f"{found[1]} {list(found[0])}" if found[0] is not None else "nothing"
                raise UserError(
                    f"{opened.path} has {has} as {name}, but {LAYOUT} says torch.{dtype} {list(piece_shape)}"
                )
            self.dtypes[name] = opened.dtypes[name]
        self.shapes[name] = tuple(shape)
        self._pieces[name] = axis, files

    def _open(self, name: str, file: Any) -> SafetensorsFile:
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{self.path}: {name}: file={file!r} is not a file of its own folder")
        if file not in self._files:
            if not (self.path.parent / file).is_file():
                raise UserError(f"{self.path} names {file}, which is missing")
            self._files[file] = SafetensorsFile(self.path.parent / file)
        return self._files[file]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            axis, files = self._pieces[name]
            whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
            targets = [whole] if axis is None else whole.chunk(len(files), axis)
            for file, target in zip(files, targets, strict=True):
                target.copy_(next(self._files[file].read([name]))[1])
            yield name, whole
            del whole, targets, target  # before the next is allocated


def write_sharded(
    files: list[WeightFile],
    folder: Path,
    places: dict[str, Place],
    tp: int,
    pp: int,
    on_bytes: Callable[[int, int], None],
) -> dict[str, str]:
    """Write rank_<stage>_<rank>.safetensors and layout.json. places: stage and axis by tensor name.

    Returns the sha256 of each weight file. `on_bytes(done, total)` is called after every tensor.
    """
    entries = entries_of(files)
    total, done = sum(entry.nbytes for entry in entries), 0
    sha256: dict[str, str] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for stage in range(pp):
        members = [entry for entry in entries if places[entry.name].stage == stage]
        with ExitStack() as stack:
            writers = []
            for rank in range(tp):
                pieces = [piece for entry in members if (piece := _piece(entry, places[entry.name].axis, tp, rank))]
                path = folder / f"rank_{stage}_{rank}.safetensors"
                writers.append(stack.enter_context(SafetensorsWriter(path, pieces)))
            for name, tensor in read_in_order(files, members):
                tensors[name] = _write_pieces(tensor, places[name], writers)
                done += tensor.nbytes
                on_bytes(done, total)
                del tensor  # before the next is read
        sha256 |= {writer.path.name: writer.sha256 for writer in writers}
    head = json.dumps({"version": VERSION, "tp": tp, "pp": pp})[:-1]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in tensors.items())
    (folder / LAYOUT).write_text(f'{head}, "tensors": {{\n{lines}\n}}}}\n', encoding="utf-8")
    return sha256


def _piece(entry: Entry, axis: int | None, tp: int, rank: int) -> Entry | None:
    """Return the piece of a tensor that a rank's file holds, or None."""
    if axis is None:
        return entry if rank == 0 else None
    shape = tuple(size // tp if i == axis else size for i, size in enumerate(entry.shape))
    return Entry(entry.name, entry.dtype, shape)


def _write_pieces(tensor: Tensor, place: Place, writers: list[SafetensorsWriter]) -> dict[str, Any]:
    """Write a tensor's pieces and return its entry in layout.json."""
    ranks = [[*range(len(writers))]] if place.axis is None else [[rank] for rank in range(len(writers))]
    parts = [tensor] if place.axis is None else tensor.chunk(len(writers), place.axis)
    pieces = []
    for which, writer, part in zip(ranks, writers, parts, strict=False):  # a whole one goes to the first alone
        writer.write(content := content_of(part))
        pieces.append({"ranks": which, "file": writer.path.name, "sha256": hashlib.sha256(content).hexdigest()})
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": [*tensor.shape], "dtype": dtype, "stage": place.stage, "axis": place.axis, "pieces": pieces}

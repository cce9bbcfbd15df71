"""Read and write importance matrices in llama.cpp's two forms: GGUF, and the older binary form (`.dat`).

An importance matrix has, for each linear layer, the mean square of each input channel on some texts. The experts of a
layer share an entry, which has a row for each expert.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from conf.errors import UserError
from models.formats.gguf.header import read_gguf_header
from models.formats.gguf.magic import is_gguf

Floats = NDArray[np.float32]

TYPE, DATASETS, NUM_CHUNKS, CHUNK_SIZE = (
    "general.type",
    "imatrix.datasets",
    "imatrix.chunk_count",
    "imatrix.chunk_size",
)
SUMS, COUNTS = ".in_sum2", ".counts"
HALVES = ("attn_k_b.weight", "attn_v_b.weight")  # llama.cpp may store attn_kv_b as these two, which have other inputs
REMEDY = "give a file of llama-imatrix, or one that quant.method=imatrix made"
NUM_NAMED = 8  # tensors that an error names


@dataclass(frozen=True)
class ImportanceMatrix:
    path: Path
    entries: dict[str, Floats]
    """Mean squares by llama.cpp's name of the weight: one row of input channels for each expert, flat."""
    datasets: list[str]
    """Names of the texts."""
    num_chunks: int

    def match(self, shapes: Mapping[str, tuple[int, int]], others: frozenset[str] = frozenset()) -> dict[str, Floats]:
        """Return the entries of a model's tensors, [M, I] each, for M experts (or 1) and I input channels.

        shapes: [M, I] of each tensor that may be quantised. others: names of the model's other tensors. Raises
        UserError if an entry has another name or size, as the file of another model does, and if no entry is left.
        """
        known = {*shapes, *others}
        unknown = [name for name in self.entries if name not in known and not name.endswith(HALVES)]
        wrong = [
            f"{name} with {entry.size} values instead of {shapes[name][0] * shapes[name][1]}"
            for name, entry in self.entries.items()
            if name in shapes and entry.size != shapes[name][0] * shapes[name][1]
        ]
        if unknown or wrong:
            raise UserError(
                f"{self.path} has the importance of another model: {_listed(wrong + unknown)}"
                f"{', which this model lacks' if unknown else ''}: give the file of this model"
            )
        matched = {name: entry.reshape(shapes[name]) for name, entry in self.entries.items() if name in shapes}
        if not matched:
            raise UserError(f"{self.path} has no entry for a tensor of this model: give the file of this model")
        return matched


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - NUM_NAMED} more" if len(texts) > NUM_NAMED else ""
    return ", ".join(texts[:NUM_NAMED]) + more


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read a file of either form. Values are means as llama-quantize uses them; 1 for an expert without tokens.

    Raises UserError for a file that is damaged or not an importance matrix, and for values that are negative or not
    finite.
    """
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty: {REMEDY}")
        matrix = _read_gguf(path) if is_gguf(path) else _read_binary(path)
    except OSError as error:
        raise UserError(f"the importance matrix {path} cannot be read ({error.strerror}): {REMEDY}") from error
    for name, entry in matrix.entries.items():
        if not (np.isfinite(entry) & (entry >= 0)).all():
            raise UserError(f"{path}: {name} has a value that is negative or not finite: {REMEDY}")
    if not matrix.entries:
        raise UserError(f"{path} has no entries: {REMEDY}")
    return matrix


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = read_gguf_header(path)
    if (kind := header.scalars.get(TYPE)) != "imatrix":
        raise UserError(f"{path} is not an importance matrix, but has {TYPE}={kind!r}: {REMEDY}")
    tensors: dict[str, Floats] = {}
    with open(path, "rb") as file:
        for name, info in header.tensors.items():
            if not name.endswith((SUMS, COUNTS)):
                continue  # newer versions also store in_sum
            if info.type.name != "F32":
                raise UserError(f"{path}: {name} has the type {info.type.name}, expected F32: {REMEDY}")
            file.seek(info.offset)
            tensors[name] = np.frombuffer(file.read(info.num_bytes), np.float32)
    entries = {}
    for name in sorted({key.removesuffix(SUMS).removesuffix(COUNTS) for key in tensors}):
        sums, counts = tensors.get(f"{name}{SUMS}"), tensors.get(f"{name}{COUNTS}")
        if sums is None or counts is None or sums.size % counts.size:
            raise UserError(f"{path}: {name} has no {SUMS[1:]} and {COUNTS[1:]} that fit together: {REMEDY}")
        if not (np.isfinite(counts) & (counts >= 0)).all():
            raise UserError(f"{path}: {name} has a count that is negative or not finite: {REMEDY}")
        columns = counts[:, None]
        with np.errstate(all="ignore"):
            means = np.where(columns > 0, sums.reshape(len(counts), -1) / columns, np.float32(1))
        entries[name] = means.reshape(-1)
    datasets = header.arrays.get(DATASETS, [])
    num_chunks = header.scalars.get(NUM_CHUNKS, 0)
    return ImportanceMatrix(path, entries, list(map(str, datasets)), num_chunks if isinstance(num_chunks, int) else 0)


def _read_binary(path: Path) -> ImportanceMatrix:
    """Read the binary form: the number of entries; for each entry the length of its name, the name, the number of calls,
    the number of values, and the values, which are sums over the calls; then, in newer files, the number of chunks and
    the name of the texts. Integers are int32.
    """
    data = np.memmap(path, np.uint8, "r")
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        if not 0 <= size <= len(data) - position:
            raise UserError(f"{path} is truncated, or not an importance matrix: {REMEDY}")
        position += size
        return data[position - size : position].tobytes()

    def number() -> int:
        value: int = struct.unpack("<i", take(4))[0]
        return value

    entries: dict[str, Floats] = {}
    for _ in range(number()):
        name = take(number()).decode("utf-8", "replace")
        if not name.isprintable():
            raise UserError(f"{path} is not an importance matrix: {REMEDY}")
        num_calls, num_values = number(), number()
        sums = np.frombuffer(take(4 * num_values), np.float32)
        entries[name] = sums / np.float32(max(num_calls, 1))
    if len(data) - position < 8:
        return ImportanceMatrix(path, entries, [], 0)
    num_chunks = number()
    return ImportanceMatrix(path, entries, [take(number()).decode("utf-8", "replace")], num_chunks)


def write_imatrix(
    path: Path, entries: Mapping[str, tuple[Floats, Floats]], dataset: str, num_chunks: int, chunk_size: int
) -> None:
    """Write a file in the GGUF form. It gets its name only when it is complete.

    entries: sums of squares [M, I] and numbers of tokens [M] by llama.cpp's name of the weight. dataset: name of the
    texts. num_chunks, chunk_size: number of samples and tokens of a sample.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.partial")
    writer = GGUFWriter(unfinished, "imatrix")
    del writer.kv_data[0]["general.architecture"]  # an importance matrix has none
    writer.add_string(TYPE, "imatrix")
    writer.add_array(DATASETS, [dataset])
    writer.add_uint32(NUM_CHUNKS, num_chunks)
    writer.add_uint32(CHUNK_SIZE, chunk_size)
    for name, (sums, counts) in sorted(entries.items()):
        writer.add_tensor(f"{name}{SUMS}", np.ascontiguousarray(sums, np.float32))
        writer.add_tensor(f"{name}{COUNTS}", np.ascontiguousarray(counts, np.float32)[:, None])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    finally:
        writer.close()
        unfinished.unlink(missing_ok=True)

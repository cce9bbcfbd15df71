"""Write a safetensors file in one pass: first the header, then one tensor at a time.

The format (https://huggingface.co/docs/safetensors) is 8 bytes with the header's length (little endian), the header
(JSON: names, dtypes, shapes, offsets), and the bytes of the tensors. The safetensors library needs all tensors in
memory.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from models.formats.base import WeightFile

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
ALIGNMENT = 64  # bytes, of the first tensor: a cache line, and an AVX-512 register
FROM_TORCH = {"format": "pt"}  # transformers requires this


@dataclass(frozen=True)
class Entry:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def entries_of(files: list[WeightFile]) -> list[Entry]:
    """Return all tensors of a checkpoint in its order, but wider dtypes first, so that each is aligned to its dtype."""
    entries = [Entry(name, file.dtypes[name], shape) for file in files for name, shape in file.shapes.items()]
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def read_in_order(files: list[WeightFile], entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield one tensor at a time; it is freed when the caller drops it.

    Reads consecutive tensors of a file in one call.
    """
    owners = {name: file for file in files for name in file.shapes}
    for file, group in groupby((entry.name for entry in entries), key=owners.__getitem__):
        yield from file.read(list(group))


def content_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes; copies them only if the tensor is not contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


class SafetensorsWriter:
    """Writes tensors in the order of `entries`. Memory holds only the current one."""

    def __init__(self, path: Path, entries: list[Entry], metadata: dict[str, str] | None = None) -> None:
        self.path = path
        self._sha256 = hashlib.sha256()
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self.write(_header(entries, FROM_TORCH | (metadata or {})))

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._sha256.update(content)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors to a file. The file gets its name only when it is complete and on the disk.

    Tensors whose size is a multiple of a cache line come first, so that each begins at a cache line. Wider dtypes come
    first in each group.
    """
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    entries.sort(key=lambda entry: (entry.nbytes % ALIGNMENT != 0, -entry.dtype.itemsize, entry.name))
    partial = path.with_name(f".{path.name}.partial")
    try:
        with SafetensorsWriter(partial, entries, metadata) as writer:  # the library writes metadata in no fixed order
            for entry in entries:
                writer.write(content_of(tensors[entry.name].detach().cpu()))
            writer.sync()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {"dtype": CODES[entry.dtype], "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

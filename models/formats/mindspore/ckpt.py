"""Read one MindSpore `.ckpt`, a protobuf message (mindspore/ccsrc/utils/checkpoint.proto):

    Checkpoint  { repeated Value value = 1 }
    Value       { string tag = 1; TensorProto tensor = 2 }
    TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }

The reader parses the fields of a mapped file itself, because the protobuf library is limited to 2 GB. A tensor above
512 MB is several consecutive Values with the same tag.
"""

import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError

DTYPES = {"Float32": torch.float32, "Float16": torch.float16, "BFloat16": torch.bfloat16}
VALUE = b"\x0a"  # the first byte of every file: field 1, length-delimited
VARINT, BYTES = 0, 2  # the wire types in use
CHECKSUM = b"crc_num"  # newer versions write it and 10 bytes after the message (train/serialization.py)
LONGEST_TEXT = 512  # bytes, of a tag or type
MOST_DIMS = 8


@dataclass
class Stored:
    dims: tuple[int, ...]
    tensor_type: str
    parts: list[slice] = field(default_factory=list)
    """Byte ranges of the content in the file."""


class CkptFile:
    """The weights of a file under the names that `rename` returns; a tensor for which it returns None is left out.

    Raises UserError if the file is damaged or a tensor is not float32, float16 or bfloat16.
    """

    is_mapped = False

    def __init__(self, path: Path, rename: Callable[[str], str | None]) -> None:
        self.path = path
        self._stored: dict[str, Stored] = {}
        data = self._map()
        try:
            for tag, stored in _values(data, _end(data)):
                self._add(tag, stored, rename)
        except ValueError as error:  # includes UserError
            raise UserError(f"{path} is damaged or not a MindSpore checkpoint: {error}") from error
        self.shapes = {name: stored.dims for name, stored in self._stored.items()}
        self.dtypes = {name: DTYPES[stored.tensor_type] for name, stored in self._stored.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            stored, data = self._stored[name], self._map()  # mapped once per tensor: pages stay resident while mapped
            if len(data) < stored.parts[-1].stop:
                raise UserError(f"{self.path} became shorter while it was read")
            tensor = torch.empty(stored.dims, dtype=DTYPES[stored.tensor_type])
            content, at = tensor.view(-1).view(torch.uint8), 0
            for part in stored.parts:  # as bytes, because protobuf does not align them
                size = part.stop - part.start
                content[at : at + size] = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=part.start)
                at += size
            yield name, tensor

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch needs writable memory
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise UserError(f"{self.path} cannot be read: {error}") from error

    def _add(self, tag: str, stored: Stored, rename: Callable[[str], str | None]) -> None:
        name = rename(tag)
        if name is None:
            return
        if name in self._stored:
            raise ValueError(f"{tag} occurs twice")
        if stored.tensor_type not in DTYPES:
            raise ValueError(f"{tag} is of type {stored.tensor_type}: only {', '.join(DTYPES)} are supported")
        size = math.prod(stored.dims) * DTYPES[stored.tensor_type].itemsize
        stored_bytes = sum(part.stop - part.start for part in stored.parts)
        if size != stored_bytes or size == 0:
            raise ValueError(
                f"{tag} {list(stored.dims)} of {stored.tensor_type} takes {size} bytes, but the file has {stored_bytes}"
            )
        self._stored[name] = stored


def _end(data: mmap.mmap) -> int:
    size = len(CHECKSUM) + 10
    return len(data) - size if data[-size : -size + len(CHECKSUM)] == CHECKSUM else len(data)


def _values(data: mmap.mmap, end: int) -> Iterator[tuple[str, Stored]]:
    """Yield tags and tensors. Consecutive Values with the same tag are one tensor."""
    last_tag, last = "", None
    for number, value in _fields(data, 0, end):
        if number != 1 or not isinstance(value, slice):
            raise ValueError(f"field {number} of Checkpoint is unknown")
        tag, stored = _value(data, value)
        if last is not None and tag == last_tag:
            if (stored.dims, stored.tensor_type) != (last.dims, last.tensor_type):
                raise ValueError(f"the parts of {tag} differ in shape or type")
            last.parts += stored.parts
            continue
        if last is not None:
            yield last_tag, last
        last_tag, last = tag, stored
    if last is not None:
        yield last_tag, last


def _value(data: mmap.mmap, span: slice) -> tuple[str, Stored]:
    tag, tensor = None, None
    for number, value in _fields(data, span.start, span.stop):
        if number == 1 and isinstance(value, slice) and tag is None:
            tag = _text(data, value)
        elif number == 2 and isinstance(value, slice) and tensor is None:
            tensor = value
        else:
            raise ValueError(f"field {number} of Value at byte {span.start} is unknown or occurs twice")
    if tag is None or tensor is None:
        raise ValueError(f"a Value at byte {span.start} has no tag or no tensor")
    return tag, _tensor(data, tensor, tag)


def _tensor(data: mmap.mmap, span: slice, tag: str) -> Stored:
    dims: list[int] = []
    tensor_type, content = None, None
    for number, value in _fields(data, span.start, span.stop):
        if number == 1:
            dims += [value] if isinstance(value, int) else _packed(data, value)
            if len(dims) > MOST_DIMS or any(dim >= 2**63 for dim in dims):
                raise ValueError(f"{tag} has more than {MOST_DIMS} dimensions, or a negative one")
        elif number == 2 and isinstance(value, slice) and tensor_type is None:
            tensor_type = _text(data, value)
        elif number == 3 and isinstance(value, slice) and content is None:
            content = value
        else:
            raise ValueError(f"field {number} of the tensor {tag} is unknown or occurs twice")
    if tensor_type is None or content is None:
        raise ValueError(f"{tag} has no type or no content")
    return Stored(tuple(dims), tensor_type, [content])


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int | slice]]:
    """Yield the number and value of each field in a message.

    A value is an integer, or the byte range of its content.
    """
    while at < end:
        key, at = _varint(data, at, end)
        number, wire_type = key >> 3, key & 7
        if wire_type == VARINT:
            value, at = _varint(data, at, end)
            yield number, value
            continue
        if wire_type != BYTES:
            raise ValueError(f"the field before byte {at} is of the unknown wire type {wire_type}")
        size, at = _varint(data, at, end)
        if size > end - at:
            raise ValueError(f"the field at byte {at} is {size} bytes long, but its message ends after {end - at}")
        yield number, slice(at, at + size)
        at += size


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """Return the integer at byte `at` (7 bits per byte, lowest first), and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at == end:
            raise ValueError(f"it ends inside a number at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number at byte {at - 10} is longer than 10 bytes")


def _packed(data: mmap.mmap, span: slice) -> list[int]:
    numbers: list[int] = []
    at = span.start
    while at < span.stop and len(numbers) <= MOST_DIMS:
        number, at = _varint(data, at, span.stop)
        numbers.append(number)
    return numbers


def _text(data: mmap.mmap, span: slice) -> str:
    text = data[span].decode() if span.stop - span.start <= LONGEST_TEXT else ""
    if not text.isprintable() or not text:
        raise ValueError(f"a name at byte {span.start} is empty, longer than {LONGEST_TEXT} bytes or not text")
    return text

"""Parse a GGUF header: metadata and tensor positions. The parser is strict, because the file is untrusted input.

Layout (ggml's docs/gguf.md): magic, version, counts, key-value pairs, tensor infos, padding, tensor data; all numbers
are little-endian. Every count is checked against the remaining bytes before anything is read or allocated for it.
"""

import math
import re
import struct
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.gguf.magic import MAGIC, is_gguf

SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
VERSIONS = (2, 3)
KEY_BYTES, NAME_BYTES, DIMENSIONS = 65535, 64, 4  # the specification's limits
SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<B",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
TYPES = {  # types that the gguf package can dequantise
    GGMLQuantizationType[name]
    for name in """
    F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS
    TQ1_0 TQ2_0 MXFP4 NVFP4
    """.split()
}
ORIGINS = (  # keys that can name the source of the file
    "general.name",
    "general.source.repo_url",
    "general.base_model.0.name",
    "general.base_model.0.repo_url",
)
SHORTEST_PAIR = 8 + 4 + 1  # bytes of a pair with an empty key and a one-byte value
SHORTEST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of a tensor info with an empty name and one dimension


@dataclass(frozen=True)
class TensorInfo:
    path: Path
    shape: tuple[int, ...]
    """Slowest dimension first, as in torch; the file has the opposite order."""
    type: GGMLQuantizationType
    offset: int
    """In bytes, from the start of the file."""
    num_bytes: int
    scale: "TensorInfo | None" = None
    """Its factor, if it is NVFP4 (scales.py). None: 1."""

    @property
    def block_size(self) -> int:
        """The numbers of a row that share a block."""
        size: int = GGML_QUANT_SIZES[self.type][0]
        return size


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    scalars: dict[str, Any]
    """Numbers, booleans and texts by key."""
    arrays: dict[str, list[str] | NDArray[Any]]
    tensors: dict[str, TensorInfo]

    def section(self, name: str) -> ConfigReader:
        """Return the scalars whose keys begin with `name.`, without this prefix."""
        values = {
            key.removeprefix(f"{name}."): value for key, value in self.scalars.items() if key.startswith(f"{name}.")
        }
        return ConfigReader(values, f"{self.path}: {name}")

    def numbers(self, key: str, kind: str, count: int) -> list[Any]:
        """Return an array of `count` numbers of a numpy kind: "i" (signed or unsigned) or "f".

        Raises UserError for anything else.
        """
        values = self.arrays.get(key)
        actual = (
            self.scalars.get(key, "none")
            if values is None
            else f"{len(values)} texts"
            if isinstance(values, list)
            else values.dtype.kind
        )
        if not isinstance(values, np.ndarray) or values.dtype.kind.replace("u", "i") != kind:
            raise UserError(f"{self.path}: {key} must be an array of kind {kind!r}, found {actual}")
        if len(values) != count:
            raise UserError(f"{self.path}: {key} has {len(values)} values, expected {count}")
        return list(values.tolist())

    def texts(self, key: str) -> list[str]:
        """Return an array of texts. Raises UserError for anything else."""
        values = self.arrays.get(key)
        if not isinstance(values, list):
            raise UserError(
                f"{self.path}: {key} must be an array of texts, found {'none' if values is None else 'numbers'}"
            )
        return values

    def unsupported(self, feature: str) -> UserError:
        """Return the error for an unsupported `feature`.

        It recommends the checkpoint from which the file was made.
        """
        known = [f"{key}={str(self.scalars[key])[:80]!r}" for key in ORIGINS if self.scalars.get(key)]
        origin = f" ({', '.join(known)})" if known else ""
        return UserError(
            f"{self.path}: {feature}: give the Hugging Face checkpoint from which the file was made{origin}"
        )


@dataclass(frozen=True)
class GGUFMetadata:
    """The metadata from which the config of a family is made."""

    header: GGUFHeader
    """Header of the first file, which has the keys."""
    read: ConfigReader
    """Keys of the architecture."""
    tensors: dict[str, TensorInfo]
    """Tensors of all files."""


def read_gguf_headers(path: Path) -> list[GGUFHeader]:
    """Read the headers of a GGUF file, of all files of a split model, or of the only model in a folder.

    The first header has the metadata.
    """
    if path.is_dir():
        files = sorted(file for file in path.glob("*.gguf") if is_gguf(file))
        models = sorted({SPLIT_NAME.sub(r"\1", file.name) for file in files})
        if len(models) > 1:
            raise UserError(
                f"{path} holds {len(models)} GGUF models ({', '.join(models[:8])}): give model.path=FILE.gguf"
            )
        path = files[0]
    name = SPLIT_NAME.fullmatch(path.name)
    count = int(name[3]) if name else 1
    paths = [path.with_name(f"{name[1]}-{i + 1:05}-of-{name[3]}.gguf") for i in range(count)] if name else [path]
    if missing := next((file.name for file in paths if not file.is_file()), None):
        raise UserError(f"{path} is one of {count} files of a model, but {missing} is missing in its folder")
    headers = [read_gguf_header(file) for file in paths]
    for i, header in enumerate(headers):
        section = header.section("split")
        number, split = section.get("no", int, 0), section.get("count", int, 0)
        if split not in (0, 1) and (split, number) != (count, i):
            raise UserError(f"{header.path} has split.no={number} and split.count={split}, which its name contradicts")
    return headers


def all_tensors(headers: list[GGUFHeader]) -> dict[str, TensorInfo]:
    """Return the tensors of all files of a model. Raises UserError if two files hold the same tensor."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        if duplicate := next((name for name in header.tensors if name in tensors), None):
            raise UserError(
                f"{header.path} holds the tensor {duplicate!r}, which {tensors[duplicate].path.name} also holds"
            )
        tensors |= header.tensors
    return tensors


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parse the header of a GGUF file.

    Raises UserError, with the expected and the actual value, for violations of the specification and for unsupported
    types.
    """
    try:
        with open(path, "rb") as file:
            return _HeaderParser(path, file).parse()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


class _HeaderParser:
    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path = path
        self._file = file
        self._size = path.stat().st_size
        self._at = 0

    def parse(self) -> GGUFHeader:
        if (magic := self._take(4, "the magic")) != MAGIC:
            raise self._error(f"the magic is {magic!r}, expected {MAGIC!r}: this is not a GGUF file")
        version = self._number("<I", "the version")
        if version and not version & 0xFFFF:
            raise self._error("the file is big-endian: convert it to little-endian")
        if version not in VERSIONS:
            raise self._error(f"version {version} is not supported: only {', '.join(map(str, VERSIONS))}")
        num_tensors = self._count("tensors", SHORTEST_TENSOR)
        num_pairs = self._count("key-value pairs", SHORTEST_PAIR)
        scalars: dict[str, Any] = {}
        arrays: dict[str, list[str] | NDArray[Any]] = {}
        for _ in range(num_pairs):
            key = self._name("a key", KEY_BYTES)
            if key in scalars or key in arrays:
                raise self._error(f"the key {key[:80]!r} occurs twice")
            kind = self._value_type(key)
            if kind is GGUFValueType.ARRAY:
                arrays[key] = self._array(key)
            else:
                scalars[key] = self._value(key, kind)
        alignment = scalars.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {str(alignment)[:40]!r}, expected a power of two of at least 8")
        header = GGUFHeader(self._path, scalars, arrays, {})
        return replace(header, tensors=self._tensors(num_tensors, alignment, header))

    def _error(self, text: str) -> UserError:
        return UserError(f"{self._path}: {text}")

    def _take(self, num_bytes: int, field: str) -> bytes:
        remaining = self._size - self._at
        if num_bytes > remaining:
            raise self._error(
                f"{field} needs {num_bytes} bytes at {self._at}, but {remaining} are left: the file is truncated or damaged"
            )
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:  # the file became shorter
            raise self._error(f"{field} at {self._at} has {len(data)} bytes, expected {num_bytes}")
        self._at += num_bytes
        return data

    def _number(self, format: str, field: str) -> Any:
        return struct.unpack(format, self._take(struct.calcsize(format), field))[0]

    def _count(self, elements: str, shortest: int) -> int:
        count: int = self._number("<Q", f"the number of {elements}")
        if count * shortest > self._size - self._at:
            raise self._error(f"{count} {elements} are declared, but only {self._size - self._at} bytes are left")
        return count

    def _text(self, field: str, limit: int) -> str:
        length = self._number("<Q", f"the length of {field}")
        if length > limit:
            raise self._error(f"{field} has {length} bytes, expected at most {limit}")
        try:
            return self._take(length, field).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{field} at {self._at - length} is not UTF-8: {error.reason}") from error

    def _name(self, field: str, limit: int) -> str:
        name = self._text(field, limit)
        if not name.isprintable():  # it appears in one-line messages
            raise self._error(f"{field} is {name[:80]!r}, which has control characters")
        return name

    def _value_type(self, key: str) -> GGUFValueType:
        kind = self._number("<I", f"the type of {key[:80]!r}")
        if kind not in GGUFValueType._value2member_map_:
            raise self._error(f"{key[:80]!r} has the value type {kind}, expected 0 to {max(GGUFValueType)}")
        return GGUFValueType(kind)

    def _value(self, key: str, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._text(f"the value of {key[:80]!r}", self._size)
        value = self._number(SCALARS[kind], f"the value of {key[:80]!r}")
        if kind is GGUFValueType.BOOL:
            if value > 1:
                raise self._error(f"{key[:80]!r} is {value}, expected 0 or 1")
            return bool(value)
        # The shortest decimal for a float32 is the value that its author wrote: 1e-5, not 9.99999974737875e-06.
        return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value

    def _array(self, key: str) -> list[str] | NDArray[Any]:
        kind = self._value_type(key)
        if kind is GGUFValueType.ARRAY:
            raise self._error(f"{key[:80]!r} is an array of arrays, which is not supported")
        elements = f"values of {key[:80]!r}"
        if kind is GGUFValueType.STRING:
            return [self._text(f"a value of {key[:80]!r}", self._size) for _ in range(self._count(elements, 8))]
        dtype = np.dtype("?" if kind is GGUFValueType.BOOL else SCALARS[kind])
        count = self._count(elements, dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize, elements), dtype)

    def _tensors(self, count: int, alignment: int, header: GGUFHeader) -> dict[str, TensorInfo]:
        infos = {}
        for _ in range(count):
            name = self._name("a tensor's name", NAME_BYTES)
            if name in infos:
                raise self._error(f"the tensor {name!r} occurs twice")
            infos[name] = self._tensor(name, alignment, header)
        start = -(-self._at // alignment) * alignment
        tensors = {name: replace(t, offset=start + t.offset) for name, t in infos.items()}
        for name, tensor in tensors.items():
            end = tensor.offset + tensor.num_bytes
            if end > self._size:
                raise self._error(
                    f"the tensor {name!r} ends at {end}, but the file has {self._size} bytes: it is truncated or damaged"
                )
        in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
        for (name, tensor), (next_name, following) in pairwise(in_order):
            if tensor.offset + tensor.num_bytes > following.offset:
                raise self._error(f"the tensors {name!r} and {next_name!r} overlap at {following.offset}")
        return tensors

    def _tensor(self, name: str, alignment: int, header: GGUFHeader) -> TensorInfo:
        """Read a tensor info.

        Its offset counts from the start of the data, as in the file. `header`: without tensors, for errors.
        """
        rank = self._number("<I", f"the rank of {name!r}")
        if not 1 <= rank <= DIMENSIONS:
            raise self._error(f"the tensor {name!r} has {rank} dimensions, expected 1 to {DIMENSIONS}")
        shape = tuple(self._number("<Q", f"the shape of {name!r}") for _ in range(rank))[::-1]
        number = self._number("<I", f"the type of {name!r}")
        offset = self._number("<Q", f"the offset of {name!r}")
        if number not in TYPES:
            is_ggml_type = number in GGMLQuantizationType._value2member_map_
            type_name = GGMLQuantizationType(number).name if is_ggml_type else f"number {number}"
            supported = ", ".join(kind.name for kind in sorted(TYPES))
            raise header.unsupported(
                f"the tensor {name!r} has the type {type_name}, which is not supported: only {supported}"
            )
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or math.prod(shape) >= 2**63:
            raise self._error(f"the tensor {name!r} has the shape {list(shape)}, which is not possible")
        if shape[-1] % block:
            raise self._error(
                f"the tensor {name!r} has rows of {shape[-1]} values, expected a multiple of {block} for {kind.name}"
            )
        if offset % alignment:
            raise self._error(f"the tensor {name!r} has the offset {offset}, expected a multiple of {alignment}")
        return TensorInfo(self._path, shape, kind, offset, math.prod(shape) // block * block_bytes)

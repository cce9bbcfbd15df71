"""Read one `.pdparams` file of paddle.save: a pickle (protocols 2 to 4) of a dictionary of numpy arrays.

The reader interprets the opcodes of a mapped file without the module pickle, and imports and calls nothing that the
file names. It accepts only the names by which numpy pickles arrays, and represents each as a value of this module. The
opcodes are documented in Python's pickletools. The reader keeps the position of an array's content and reads it on
request.
"""

import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError

# numpy has no bfloat16: Paddle stores the bits as uint16. No model has real uint16 tensors.
DTYPES = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "u2": torch.bfloat16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "i4": torch.int32,
    "i8": torch.int64,
}
PARAMETER_NAMES = "StructuredToParameterName@@"  # Paddle's own parameter names, next to the arrays
SPLIT = "UnpackBigParamInfor@@"  # arrays above 1 GB in several pieces, for protocols 2 and 3
ALLOWED = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
    "__builtin__ bytes": "bytes",  # how protocol 2 encodes an empty bytes object
    "builtins tuple": "tuple",
    "__builtin__ tuple": "tuple",
    "collections OrderedDict": "dict",
}
LONGEST_TEXT = 512  # bytes, of a name
MOST_DIMS = 8
# An array takes about thirty opcodes. An opcode can take 200 bytes of memory; without a limit, a file of opcodes alone
# could use all memory.
MOST_OPCODES = 2**23
MARK = object()

# Opcodes by the size in bytes of their operand: the length before a content, or a number.
TEXTS = {b"X": 4, b"\x8c": 1, b"\x8d": 8, b"T": 4, b"U": 1}
CONTENTS = {b"B": 4, b"C": 1, b"\x8e": 8}
NUMBERS = {b"K": 1, b"M": 2, b"J": 4}
PUTS, GETS = {b"q": 1, b"r": 4}, {b"h": 1, b"j": 4}
CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
BYTES_OF_TEXT = b"TU"  # Python 2 strings, whose bytes can be the content of an array


@dataclass(frozen=True)
class Content:
    """The position of bytes or text in the file."""

    place: slice
    is_text: bool
    is_encoded: bool = False
    """Whether it is UTF-8 text with one character per byte, as protocol 2 stores bytes."""


@dataclass(frozen=True)
class AllowedName:
    """A name that the reader accepts."""

    meaning: str


@dataclass
class Dtype:
    code: str


@dataclass
class Array:
    """An array. The first BUILD opcode sets its state."""

    dims: tuple[int, ...] = ()
    code: str = ""
    is_fortran: bool = False
    content: Content | None = None


class PdparamsFile:
    """The arrays of a file by name. Raises UserError if the file is damaged or holds anything else."""

    is_mapped = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = _Machine(self._map()).run()
            self._arrays = _arrays(content)
        except (ValueError, IndexError) as error:  # ValueError includes UserError; IndexError: the stack is empty
            raise UserError(f"{path} is damaged or holds more than arrays: {error}") from error
        self.shapes = {name: array.dims for name, array in self._arrays.items()}
        self.dtypes = {name: DTYPES[array.code] for name, array in self._arrays.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            array, data = self._arrays[name], self._map()  # mapped once per tensor: pages stay resident while mapped
            assert array.content is not None
            tensor = torch.empty(array.dims[::-1] if array.is_fortran else array.dims, dtype=DTYPES[array.code])
            try:
                content = _bytes(data, array.content)
            except UnicodeError as error:
                raise UserError(f"{self.path}: {name} is damaged: {error}") from error
            if len(content) != tensor.nbytes:
                raise UserError(f"{self.path}: {name} has {len(content)} bytes, expected {tensor.nbytes}")
            tensor.view(-1).view(torch.uint8).copy_(content)  # as bytes, because a pickle does not align them
            yield name, tensor.permute(tuple(reversed(range(tensor.ndim)))) if array.is_fortran else tensor

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch needs writable memory
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise UserError(f"{self.path} cannot be read: {error}") from error


def _bytes(data: mmap.mmap, content: Content) -> Tensor:
    """Return the content as uint8 [N]: a view of the file, or decoded."""
    place = content.place
    if place.start == place.stop or place.stop > len(data):
        return torch.empty(0, dtype=torch.uint8)
    if content.is_encoded:
        return torch.frombuffer(bytearray(data[place].decode().encode("latin1")), dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8, count=place.stop - place.start, offset=place.start)


def _arrays(content: Any) -> dict[str, Array]:
    if not isinstance(content, dict):
        raise ValueError("it does not hold a dictionary")
    if SPLIT in content:
        raise ValueError("it holds split arrays: save it again with paddle.save(..., protocol=4)")
    values = {name: value for name, value in content.items() if name != PARAMETER_NAMES}
    # Tensors outside a state dictionary are pickled as a pair: Paddle's name and the array.
    values = {
        name: value[1] if isinstance(value, tuple) and len(value) == 2 else value for name, value in values.items()
    }
    for name, value in values.items():
        if not isinstance(value, Array) or value.content is None:
            raise ValueError(f"{name} is not an array")
    return values


class _Machine:
    """Reads a pickle into dictionaries, tuples, lists, numbers, `Content` and `Array`.

    Raises ValueError for anything else.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MOST_OPCODES):
            if (opcode := self._take(1)) == b".":
                (value,) = self._stack
                return value
            if not (self._push(opcode) or self._remember(opcode) or self._collect(opcode)):
                self._construct(opcode)
        raise ValueError(f"it has more than {MOST_OPCODES} opcodes")

    def _take(self, size: int) -> bytes:
        return self._data[self._skip(size)]

    def _skip(self, size: int) -> slice:
        """Advance past the next `size` bytes and return their range."""
        place = slice(self._at, self._at + size)
        if place.stop > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, inside the value that begins at byte {self._at}")
        self._at = place.stop
        return place

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _push(self, opcode: bytes) -> bool:
        """Push a constant, a number, a text or bytes. Return False for other opcodes."""
        if opcode in CONSTANTS:
            self._stack.append(CONSTANTS[opcode])
        elif opcode in TEXTS:
            size = self._number(TEXTS[opcode])
            self._stack.append(Content(self._skip(size), is_text=True, is_encoded=opcode not in BYTES_OF_TEXT))
        elif opcode in CONTENTS:
            size = self._number(CONTENTS[opcode])
            self._stack.append(Content(self._skip(size), is_text=False))
        elif opcode in NUMBERS:
            self._stack.append(int.from_bytes(self._take(NUMBERS[opcode]), "little", signed=opcode == b"J"))
        elif opcode == b"\x8a":
            self._stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))
        elif opcode in (b"(", b"}", b"]"):
            self._stack.append(MARK if opcode == b"(" else {} if opcode == b"}" else [])
        else:
            return False
        return True

    def _remember(self, opcode: bytes) -> bool:
        """Store to the memo, load from it, or skip a header. Return False for other opcodes."""
        if opcode in PUTS:
            self._memo[self._number(PUTS[opcode])] = self._stack[-1]
        elif opcode == b"\x94":
            self._memo[len(self._memo)] = self._stack[-1]
        elif opcode in GETS:
            number = self._number(GETS[opcode])
            if number not in self._memo:
                raise ValueError(f"value {number}, which is read before byte {self._at}, was never stored")
            self._stack.append(self._memo[number])
        elif opcode in (b"\x80", b"\x95"):  # protocol, frame
            self._skip(1 if opcode == b"\x80" else 8)
        else:
            return False
        return True

    def _collect(self, opcode: bytes) -> bool:
        """Make a tuple, or add items to a list or dictionary. Return False for other opcodes."""
        if opcode in TUPLES:
            self._stack.append(tuple(self._pop(TUPLES[opcode])))
        elif opcode == b"t":
            self._stack.append(tuple(self._pop_to_mark()))
        elif opcode in (b"s", b"u"):
            items = self._pop(2) if opcode == b"s" else self._pop_to_mark()
            target = self._stack[-1]
            if not isinstance(target, dict) or len(items) % 2:
                raise ValueError(f"items before byte {self._at} do not belong to a dictionary")
            target.update(zip(map(self._text, items[::2]), items[1::2], strict=True))
        elif opcode in (b"a", b"e"):
            items = self._pop(1) if opcode == b"a" else self._pop_to_mark()
            if not isinstance(self._stack[-1], list):
                raise ValueError(f"items before byte {self._at} do not belong to a list")
            self._stack[-1].extend(items)
        else:
            return False
        return True

    def _construct(self, opcode: bytes) -> None:
        if opcode == b"c":
            self._stack.append(_allowed_name(f"{self._line()} {self._line()}"))
        elif opcode == b"\x93":
            module, name = self._pop(2)
            self._stack.append(_allowed_name(f"{self._text(module)} {self._text(name)}"))
        elif opcode == b"R":
            function, arguments = self._pop(2)
            self._stack.append(self._call(function, arguments))
        elif opcode == b"b":
            (state,) = self._pop(1)
            self._build(self._stack[-1], state)
        else:
            raise ValueError(f"byte {self._at - 1} is {opcode!r}, an opcode that arrays do not need")

    def _call(self, function: Any, arguments: Any) -> Any:
        meaning = function.meaning if isinstance(function, AllowedName) else None
        match meaning, arguments:
            case "array", (AllowedName("ndarray"), *_):
                return Array()
            case "dtype", (code, *_):
                return Dtype(self._text(code))
            case "encode", (Content(place, True), codec) if self._text(codec) == "latin1":
                return Content(place, is_text=False, is_encoded=True)
            case "bytes", ():
                return Content(slice(0, 0), is_text=False)
            case "tuple", (tuple(values),):
                return values
            case "dict", ():
                return {}
        raise ValueError(f"it calls a function before byte {self._at} that does not build an array")

    def _build(self, target: Any, state: Any) -> None:
        match target, state:
            case Dtype(), (_, order, *_) if self._text(order) in ("<", "|"):
                return
            case Dtype(code), _:
                raise ValueError(f"{code} before byte {self._at} is not in this machine's byte order")
            case Array(), (_, tuple(dims), Dtype(code), fortran, Content() as content):
                if len(dims) > MOST_DIMS or not all(type(size) is int and size >= 0 for size in dims):
                    raise ValueError(f"an array before byte {self._at} has no shape of up to {MOST_DIMS} sizes")
                if math.prod(size or 1 for size in dims) >= 2**48:  # a size 0 counts as 1, as in torch's strides
                    raise ValueError(f"an array before byte {self._at} has sizes that no file can hold")
                if code not in DTYPES:
                    raise ValueError(
                        f"an array before byte {self._at} is of type {code}: only {', '.join(DTYPES)} are read"
                    )
                size, stored_bytes = math.prod(dims) * DTYPES[code].itemsize, content.place.stop - content.place.start
                if stored_bytes < size or (stored_bytes > size and not content.is_encoded):
                    raise ValueError(
                        f"an array {list(dims)} before byte {self._at} takes {size} bytes, but the file has {stored_bytes}"
                    )
                target.dims, target.code, target.is_fortran, target.content = dims, code, bool(fortran), content
                return
        raise ValueError(f"the state before byte {self._at} is not of an array of numbers")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError(f"values are missing before byte {self._at}")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        at = next((i for i in reversed(range(len(self._stack))) if self._stack[i] is MARK), None)
        if at is None:
            raise ValueError(f"values are missing before byte {self._at}")
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _text(self, value: Any) -> str:
        if not isinstance(value, Content) or not value.is_text or value.place.stop - value.place.start > LONGEST_TEXT:
            raise ValueError(f"the value before byte {self._at} is not a name of at most {LONGEST_TEXT} bytes")
        text = self._data[value.place].decode()
        if not text.isprintable():
            raise ValueError(f"a name before byte {self._at} has control characters")
        return text

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + LONGEST_TEXT)
        if end < 0:
            raise ValueError(f"a name at byte {self._at} has no end")
        line = self._take(end + 1 - self._at)[:-1].decode()
        if not line.isprintable():
            raise ValueError(f"a name before byte {self._at} has control characters")
        return line


def _allowed_name(name: str) -> AllowedName:
    if name not in ALLOWED:
        raise ValueError(f"it names {name.replace(' ', '.')}, which is not called: only numpy arrays are read")
    return AllowedName(ALLOWED[name])

"""Values in messages: JSON in the header, and the bytes of tensors in the payload.

A value is a dataclass, named tuple, list, tuple or dict of values, a tensor, a batch, or JSON. The receiver knows its
type.
"""

import dataclasses
import functools
import math
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from models.batch import Batch, BatchShape

ALIGNMENT = 16  # bytes; of a tensor in the payload


def encode(value: object) -> tuple[Any, bytes]:
    """Return the JSON form of a value, and the bytes of its tensors."""
    parts: list[Any] = []
    return _json(value, parts), b"".join(parts)


def _json(value: object, parts: list[Any]) -> Any:
    if isinstance(value, Tensor):
        content = value.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        parts += content, bytes(-len(content) % ALIGNMENT)
        return str(value.dtype).removeprefix("torch."), [*value.shape]
    if isinstance(value, Batch):
        return _json(value.numbers, parts), value.shape
    if isinstance(value, list | tuple):
        return [_json(element, parts) for element in value]
    if isinstance(value, dict):
        return {name: _json(element, parts) for name, element in value.items()}
    if dataclasses.is_dataclass(value):
        return [_json(getattr(value, field.name), parts) for field in dataclasses.fields(value)]
    return value


def decode(kind: Any, json: Any, payload: bytearray, device: torch.device) -> Any:
    """Return the value of this type. Its tensors are on the device; batches are on the CPU.

    Tensors on the CPU share the memory of `payload`.
    """
    return _Decoder(payload, device).value(kind, json)


class _Decoder:
    """Reads the tensors of a payload in order."""

    def __init__(self, payload: bytearray, device: torch.device) -> None:
        self._payload, self._device, self._start = payload, device, 0

    def value(self, kind: Any, json: Any) -> Any:
        if kind is Tensor:
            return self._tensor(*json).to(self._device)
        if kind is Batch:
            numbers, shape = json
            return Batch(self._tensor(*numbers), BatchShape(*shape))
        if (types := _field_types(kind)) is not None:
            return kind(*map(self.value, types, json))
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is list:
            return [self.value(arguments[0], element) for element in json]
        if origin is tuple:
            return tuple(map(self.value, arguments, json))
        if origin is dict:
            return {name: self.value(arguments[1], element) for name, element in json.items()}
        if origin is UnionType and json is not None:
            return self.value(arguments[0], json)
        return json

    def _tensor(self, name: str, shape: list[int]) -> Tensor:
        dtype, count, start = getattr(torch, name), math.prod(shape), self._start
        if not count:
            return torch.empty(shape, dtype=dtype)
        num_bytes = count * dtype.itemsize
        self._start += num_bytes + -num_bytes % ALIGNMENT
        return torch.frombuffer(self._payload, dtype=dtype, count=count, offset=start).view(shape)


_type_hints = functools.cache(get_type_hints)


@functools.cache
def _field_types(kind: Any) -> list[Any] | None:
    """Return the types of the fields of a dataclass or named tuple, and None for another type."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "_fields"):
        names = kind._fields
    else:
        return None
    types = get_type_hints(kind)
    return [types[name] for name in names]


def result_type(operation: Any) -> Any:
    """Return the type that the operation's `compute` returns; NoneType for None."""
    return _type_hints(type(operation).compute)["return"]

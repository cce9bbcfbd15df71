"""Tensors in messages: a dtype and a shape for each in the JSON object, their bytes concatenated in the payload."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

Described = tuple[str, list[int]]
"""A dtype and a shape."""


def described(tensors: Iterable[Tensor]) -> list[Described]:
    """Return the dtypes and shapes that `read` needs."""
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]


def numbers_of(tensors: Iterable[Tensor]) -> bytes:
    filled = (tensor.contiguous().cpu() for tensor in tensors if tensor.numel())
    return b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in filled)


def read(described: list[Described], content: bytearray, start: int = 0) -> list[Tensor]:
    """Return the tensors, on the CPU, whose bytes begin at offset `start`. They share the memory of `content`."""
    tensors = []
    for name, shape in described:
        dtype, count = getattr(torch, name), math.prod(shape)
        if count:
            tensors.append(torch.frombuffer(content, dtype=dtype, count=count, offset=start).view(shape))
        else:
            tensors.append(torch.empty(shape, dtype=dtype))
        start += count * dtype.itemsize
    return tensors

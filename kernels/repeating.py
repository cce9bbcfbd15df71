"""The simplest torch operators as calls of the C++ library. A replay then runs them without Python, whose overhead is
larger than the operators' time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES

aten = torch.ops.aten
MAX_AXES = 4  # of a copied tensor


def repeat_in_library(library: Library, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
    """Write an operator's result again with a bit-identical library call. Returns False if the library does not support
    the arguments."""
    make = CALLS.get(func)
    if make is None or not result.is_cpu or result.numel() == 0:
        return False
    return make(library, result, *args, **kwargs)


def _add(library: Library, out: Tensor, a: Tensor, b: Any, alpha: float = 1) -> bool:
    if not isinstance(b, Tensor) or alpha != 1 or not (_are_alike(out, a) and _are_alike(out, b)):
        return False
    library.torch_add(a.data_ptr(), b.data_ptr(), out.data_ptr(), DTYPES[out.dtype], out.numel())
    return True


def _multiply(library: Library, out: Tensor, a: Any, b: Any) -> bool:
    if not isinstance(b, int | float) or not _are_alike(out, a):
        return False
    library.torch_scale(a.data_ptr(), b, out.data_ptr(), DTYPES[out.dtype], out.numel())
    return True


def _convert(library: Library, out: Tensor, x: Tensor, **_: Any) -> bool:
    dtypes, are_whole = (x.dtype, out.dtype), x.is_contiguous() and out.is_contiguous()
    if x.dtype == out.dtype or not x.is_cpu or not are_whole or not DTYPES.keys() >= {*dtypes}:
        return False
    library.torch_convert(x.data_ptr(), DTYPES[x.dtype], out.data_ptr(), DTYPES[out.dtype], out.numel())
    return True


def _clone(library: Library, out: Tensor, x: Tensor, **_: Any) -> bool:
    if not _can_copy(x, out):
        return False
    _copy(library, x, out)
    return True


def _join(library: Library, out: Tensor, parts: list[Tensor], dim: int = 0) -> bool:
    parts = [part for part in parts if part.numel()]
    places = out.split([part.shape[dim] for part in parts], dim)
    if any(part.ndim != out.ndim for part in parts) or not all(map(_can_copy, parts, places)):
        return False
    for part, place in zip(parts, places, strict=True):
        _copy(library, part, place)
    return True


def _are_alike(out: Tensor, x: Any) -> bool:
    """Return whether x has out's shape and dtype, and both are contiguous on the CPU."""
    is_alike = isinstance(x, Tensor) and x.is_cpu and (x.shape, x.dtype) == (out.shape, out.dtype) and x.dtype in DTYPES
    return is_alike and x.is_contiguous() and out.is_contiguous()


def _can_copy(x: Tensor, to: Tensor) -> bool:
    is_alike = x.is_cpu and (x.shape, x.dtype) == (to.shape, to.dtype)
    return (
        is_alike
        and 0 < x.ndim <= MAX_AXES
        and all(tensor.shape[-1] == 1 or tensor.stride(-1) == 1 for tensor in (x, to))
    )


def _copy(library: Library, x: Tensor, to: Tensor) -> None:
    missing = (0,) * (MAX_AXES - x.ndim)
    strides = ([stride * x.itemsize for stride in (*missing, *part.stride()[:-1])] for part in (x, to))
    from_strides, to_strides = strides
    library.torch_copy(
        x.data_ptr(),
        *from_strides,
        to.data_ptr(),
        *to_strides,
        *(1 for _ in missing),
        *x.shape[:-1],
        x.shape[-1] * x.itemsize,
    )


CALLS: dict[Any, Callable[..., bool]] = {
    aten._to_copy.default: _convert,
    aten.add.Tensor: _add,
    aten.cat.default: _join,
    aten.clone.default: _clone,
    aten.mul.Tensor: _multiply,
}

"""The layout of keys and values in the paged cache, shared by kv_store, paged_attention and copy_blocks.

A vector is the key or value of one token in one head. N blocks of B slots, G key/value heads, D channels per head.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.dtypes import DTYPES
from kernels.operator import Parts

INT8_MAX, FLOAT8_MAX, INT4_MAX = 127, 448, 15
INT8_NAN = -128
TINY = torch.finfo(torch.float32).tiny
REGISTER_BYTES = 64


class KVFormat(Protocol):
    """The encoding of cached vectors of D channels. Each vector is encoded on its own, so its codes do not depend on
    other tokens."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to store, each [..., G, *], for vectors [..., G, D]."""

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Return the vectors that `encode` stored: [..., G, D], or wider if D was padded."""


@dataclass(frozen=True)
class Unquantised:
    """Vectors in their own dtype."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        return (vectors,)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0]


@dataclass(frozen=True)
class Int8:
    """int8 codes [D] and a float32 scale: x = code * scale, symmetric. The error of an element is at most half a scale."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        vectors = vectors.float()
        scale = _scale(vectors, INT8_MAX)
        return (vectors / scale[..., None]).round().to(torch.int8), scale

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        return codes.float() * scale[..., None]


@dataclass(frozen=True)
class Float8:
    """float8_e4m3fn codes [D] (arXiv 2209.05433) and a float32 scale: x = code * scale. The error of an element is at
    most 1/16 of its value, or 2^-10 of a scale if that is more."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        vectors = vectors.float()
        scale = _scale(vectors, FLOAT8_MAX)
        return (vectors / scale[..., None]).to(torch.float8_e4m3fn), scale

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        return codes.float() * scale[..., None]


@dataclass(frozen=True, eq=False)
class StaticInt8:
    """int8 codes [D] with static scales: x = code * scale of its head. The error of an element is at most half a scale;
    values beyond 127 scales saturate. A value that is not finite has the code -128 and is read as NaN."""

    scales: Tensor  # [G] float32

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        steps = (vectors.float() / self.scales.to(vectors.device)[:, None]).round().clamp(-INT8_MAX, INT8_MAX)
        return (steps.where(vectors.isfinite(), INT8_NAN).to(torch.int8),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        (codes,) = stored
        return codes.float().where(codes != INT8_NAN, torch.nan) * self.scales.to(codes.device)[:, None]


@dataclass(frozen=True, eq=False)
class StaticFloat8:
    """float8_e4m3fn codes [D] with static scales: x = code * scale of its head. Values beyond 448 scales saturate. A
    value that is not finite is read as NaN."""

    scales: Tensor  # [G] float32

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        steps = (vectors.float() / self.scales.to(vectors.device)[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX)
        return (steps.where(vectors.isfinite(), torch.nan).to(torch.float8_e4m3fn),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        (codes,) = stored
        return codes.float() * self.scales.to(codes.device)[:, None]


@dataclass(frozen=True)
class Int4:
    """Two codes from 0 to 15 per byte [P/2], channel 2i in the low bits. Each group of C channels has a scale and a
    minimum, float16 [P/C, 2]: x = code * scale + minimum. P is D padded to whole groups.

    The error of an element is at most half a scale plus the rounding error of the minimum, 2^-11 of it.
    """

    num_groups: int
    """Groups of a head of 16 to 128 channels. Wider heads have more groups, of 128 / num_groups channels; narrower
    heads have groups of at least 4 channels."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        vectors = vectors.float()
        size = self._group_size(vectors.shape[-1])
        # repeats the last channel, which does not widen the range of its group
        padding = vectors[..., -1:].expand(*vectors.shape[:-1], -vectors.shape[-1] % size)
        groups = torch.cat((vectors, padding), dim=-1).unflatten(-1, (-1, size))  # [..., P/C, C]
        lowest, highest = groups.aminmax(dim=-1)
        lowest, scale = lowest.half(), ((highest - lowest) / INT4_MAX).half()
        steps = (groups - lowest.float()[..., None]) / scale.float().clamp(min=TINY)[..., None]
        codes = steps.round().clamp(0, INT4_MAX).to(torch.uint8).flatten(-2)  # [..., P]
        return codes[..., ::2] | codes[..., 1::2] << 4, torch.stack((scale, lowest), dim=-1)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        packed, ranges = stored
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [..., P]
        scale, lowest = ranges.float().unsqueeze(-2).unbind(-1)  # [..., P/C, 1]
        groups: Tensor = codes.unflatten(-1, (ranges.shape[-2], -1)) * scale + lowest  # [..., P/C, C]
        return groups.flatten(-2)

    def _group_size(self, channels: int) -> int:
        """Return C, an even number."""
        return min(max(4, 2 * math.ceil(channels / (2 * self.num_groups))), 128 // self.num_groups)


def _scale(vectors: Tensor, largest_code: float) -> Tensor:
    """Return a float32 scale per vector. It is above 0, so that zeros can be encoded; it is NaN or infinite if the
    vector is."""
    return (vectors.abs().amax(-1) / largest_code).clamp(min=TINY)


FORMATS: dict[str, tuple[KVFormat, KVFormat]] = {
    "none": (Unquantised(), Unquantised()),
    "int8": (Int8(), Int8()),
    "fp8": (Float8(), Float8()),
    # Some channels of keys are far larger than the rest: DECISIONS.md (KV cache) has the perplexity by the number of groups.
    "int4": (Int4(4), Int4(1)),
}
"""The formats of keys and of values, by the names of `quant.kv_cache`."""
STATIC_FORMATS: dict[str, type[StaticInt8] | type[StaticFloat8]] = {"int8": StaticInt8, "fp8": StaticFloat8}
"""The formats with static scales."""
STATIC_MAX = {StaticInt8: INT8_MAX, StaticFloat8: FLOAT8_MAX}
"""Codes range from minus this value to this value."""


_NAMES: dict[KVFormat, str] = {
    Unquantised(): "none",
    Int8(): "int8",
    Float8(): "fp8",
    Int4(4): "int4, 4 groups",
    Int4(1): "int4, 1 group",
}
"""The name of a format in a graph. Formats with static scales use the names in STATIC_FORMATS."""


class View(ctypes.Structure):
    """`PagedVectors` in kernels/kv_format.h."""

    _fields_ = (
        ("stored", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("block_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("stored_size", ctypes.c_int64),
        ("scales_size", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("has_margin", ctypes.c_int32),
    )


# `enum class KVFormat` in kv_format.h
NUMBERS = {Unquantised: 0, Int8: 1, Float8: 2, Int4: 3, StaticInt8: 1, StaticFloat8: 2}
# dtype of the stored codes; None: the dtype of the vectors
CODES = {0: None, 1: torch.int8, 2: torch.float8_e4m3fn, 3: torch.uint8}
MAX_GROUP = 128  # int4 codes that share a scale


@dataclass(frozen=True)
class PagedVectors:
    """The keys or the values of one layer."""

    tensors: tuple[Tensor, ...]  # each [N, B, G, *], as `format` encodes
    format: KVFormat
    channels: int  # D; may be less than the stored channels, then only the first D count
    dtype: torch.dtype  # of the decoded vectors

    @property
    def has_static_scales(self) -> bool:
        return isinstance(self.format, StaticInt8 | StaticFloat8)

    @property
    def scales(self) -> Tensor | None:
        """Return the scales per vector [N, B, G, *] (int4: with the minimums), or the static scales per head [G]."""
        if isinstance(self.format, StaticInt8 | StaticFloat8):
            return self.format.scales
        return self.tensors[1] if len(self.tensors) == 2 else None

    @functools.cached_property
    def view(self) -> View | None:
        """The view for the C++ kernels; None if they do not support these tensors."""
        stored, scales = self.tensors[0], self.scales
        if self.dtype not in DTYPES or type(self.format) not in NUMBERS or not self._holds_channels():
            return None
        if any(part.device.type != "cpu" or not part.is_contiguous() for part in (stored, scales) if part is not None):
            return None
        return View(
            stored=stored.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            block_size=stored.shape[1],
            num_heads=stored.shape[2],
            channels=self.channels,
            stored_size=stored.shape[3],
            scales_size=0 if scales is None or self.has_static_scales else scales[0, 0, 0].numel(),
            format=NUMBERS[type(self.format)],
            dtype=DTYPES[self.dtype],
            has_margin=_bytes_behind(stored) >= REGISTER_BYTES,
        )

    def _holds_channels(self) -> bool:
        """Return whether the tensors have the shapes and dtypes from which C++ computes the addresses of channels and
        scales."""
        stored, scales, is_int4 = self.tensors[0], self.scales, isinstance(self.format, Int4)
        dtype = CODES[NUMBERS[type(self.format)]] or self.dtype
        if stored.ndim != 4 or stored.dtype != dtype or self.channels > stored.shape[3] * (1 + is_int4):
            return False
        if scales is None:
            return isinstance(self.format, Unquantised)
        if is_int4:
            width, groups = 2 * stored.shape[3], scales.shape[3] if scales.ndim == 5 else 0
            is_divided = groups > 0 and width % (2 * groups) == 0 and width <= MAX_GROUP * groups
            return is_divided and (scales.shape, scales.dtype) == ((*stored.shape[:3], groups, 2), torch.float16)
        shape = stored.shape[2:3] if self.has_static_scales else stored.shape[:3]
        return (scales.shape, scales.dtype) == (shape, torch.float32)


def allocate(
    format: KVFormat, size: tuple[int, int, int], channels: int, dtype: torch.dtype, device: torch.device
) -> PagedVectors:
    """Allocate a pool of `size` [N, B, G], not initialised: every slot is written before it is read, and on a CPU the
    system assigns no page before a write (torch.zeros would touch all pages). REGISTER_BYTES of memory follow, because
    C++ reads whole registers; without them it copies vectors that do not fill a register."""
    # On the CPU if possible: arithmetic on the meta device imports torch._dynamo, which takes 2.6 s.
    is_meta = isinstance(format, StaticInt8 | StaticFloat8) and format.scales.is_meta
    token = format.encode(torch.zeros(size[2], channels, dtype=dtype, device="meta" if is_meta else "cpu"))
    shapes = [(*size[:2], *part.shape) for part in token]
    tensors = tuple(
        torch.empty(math.prod(shape) + REGISTER_BYTES, dtype=part.dtype, device=device)[: math.prod(shape)].view(shape)
        for part, shape in zip(token, shapes, strict=True)
    )
    return PagedVectors(tensors, format, channels, dtype)


def _bytes_behind(tensor: Tensor) -> int:
    memory = tensor.untyped_storage()
    return memory.data_ptr() + memory.nbytes() - tensor.data_ptr() - tensor.nbytes


def _parts(vectors: PagedVectors) -> tuple[tuple[Tensor, ...], str, Tensor | None, int, torch.dtype]:
    """Flatten the vectors for a graph. The format is represented by its name, and by its scales if they are static."""
    format = vectors.format
    for name, kind in STATIC_FORMATS.items():
        if isinstance(format, kind):
            return vectors.tensors, name, format.scales, vectors.channels, vectors.dtype
    if format not in _NAMES:
        raise ValueError(f"a graph cannot have a cache of {format}, only of {', '.join(_NAMES.values())}")
    return vectors.tensors, _NAMES[format], None, vectors.channels, vectors.dtype


def _of_parts(
    tensors: Sequence[Tensor], format: str, scales: Tensor | None, channels: int, dtype: torch.dtype
) -> PagedVectors:
    if scales is not None:
        return PagedVectors(tuple(tensors), STATIC_FORMATS[format](scales), channels, dtype)
    formats = {name: format for format, name in _NAMES.items()}
    return PagedVectors(tuple(tensors), formats[format], channels, dtype)


PARTS = Parts(_parts, _of_parts)  # in the schemas of operators

"""Causal attention over the paged cache, for prefill and decode.

T new tokens of S sequences, H query heads of D channels, E channels per value. In C++ the bits of a token depend only
on its sequence and position: not on other sequences, on how its sequence was split into steps, or on the number of
threads.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.build import Library
from kernels.kv_format import PARTS, PagedVectors
from kernels.operator import UnsupportedArguments, operator
from kernels.paged_attention import reference

__all__ = ["paged_attention"]


def _empty_values(query: Tensor, key_cache: PagedVectors, value_cache: PagedVectors, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value_cache.channels)


@operator(
    reference.paged_attention,
    fake=_empty_values,
    has_triton=True,
    parts={"key_cache": PARTS, "value_cache": PARTS},
)
def paged_attention(
    cpp: Library,
    query: Tensor,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return attention [T, H, E], as `reference.paged_attention` does, but in float32: products of bfloat16 are exact
    and summed in float32."""
    keys, values = key_cache.view, value_cache.view
    per_head = [vector for vector in (alibi_slopes, sinks) if vector is not None]
    fit = _fit(query, key_cache, value_cache, block_tables, query_starts, context_lengths, per_head, prefix_lengths)
    if keys is None or values is None or not fit:
        raise UnsupportedArguments
    query, block_tables = query.contiguous(), block_tables.contiguous()
    query_starts, context_lengths = query_starts.contiguous(), context_lengths.contiguous()
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    prefix_lengths = None if prefix_lengths is None else prefix_lengths.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    out = torch.empty(query.shape[0], query.shape[1], value_cache.channels, dtype=query.dtype)
    cpp.paged_attention(
        query.data_ptr(),
        ctypes.addressof(keys),
        ctypes.addressof(values),
        block_tables.data_ptr(),
        block_tables.shape[1],
        query_starts.data_ptr(),
        context_lengths.data_ptr(),
        context_lengths.shape[0],
        query.shape[1],
        scale,
        soft_cap or 0.0,
        window or 0,
        chunk or 0,
        None if alibi_slopes is None else alibi_slopes.data_ptr(),
        None if prefix_lengths is None else prefix_lengths.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
    )
    return out


def _fit(
    query: Tensor,
    key_cache: PagedVectors,
    value_cache: PagedVectors,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    per_head: list[Tensor],
    prefix_lengths: Tensor | None,
) -> bool:
    numbers = [(block_tables, 2), (query_starts, 1), (context_lengths, 1), (prefix_lengths, 1)]
    return (
        all(part is None or (part.dtype, part.ndim) == (torch.int64, rank) for part, rank in numbers)
        and query.ndim == 3
        and (query.shape[2], query.dtype, query.dtype) == (key_cache.channels, key_cache.dtype, value_cache.dtype)
        and key_cache.tensors[0].shape[:3] == value_cache.tensors[0].shape[:3]
        and query.shape[1] % key_cache.tensors[0].shape[2] == 0
        and len(block_tables) == len(context_lengths) == len(query_starts) - 1
        and (prefix_lengths is None or len(prefix_lengths) == len(context_lengths))
        and all((vector.shape, vector.dtype) == (query.shape[1:2], torch.float32) for vector in per_head)
    )

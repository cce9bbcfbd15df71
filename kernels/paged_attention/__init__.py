"""Causal attention over the paged cache, for prefill and decode alike."""

from torch import Tensor

from kernels.kv_format import PagedVectors

__all__ = ["paged_attention"]


def paged_attention(
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
) -> Tensor:
    """See kernels/paged_attention/reference.py."""
    if query.is_cuda:
        from kernels.paged_attention.triton import paged_attention as implementation
    else:
        from kernels.paged_attention.reference import paged_attention as implementation
    return implementation(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lengths,
        scale,
        soft_cap,
        window,
        alibi_slopes,
        prefix_lengths,
    )

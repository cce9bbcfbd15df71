"""The operators of a graph that read or write the cache, and the sources of the indices that they trust."""

from collections.abc import Callable
from typing import Any

from kernels.gated_delta import gated_delta
from kernels.kv_store import kv_store, rope_and_store
from kernels.paged_attention import paged_attention
from kernels.short_conv import short_conv
from kernels.ssd import ssd

CACHE_OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (kv_store, rope_and_store, paged_attention, short_conv, gated_delta, ssd)
}
"""The operators, by the names of their nodes."""
CACHE_INDEX_PRODUCERS = {
    ("kv_store", "slots"): {"slots"},
    ("rope_and_store", "slots"): {"slots"},
    ("paged_attention", "block_tables"): {"block_tables"},
    ("paged_attention", "query_starts"): {"query_starts", "output_starts"},
    ("paged_attention", "context_lengths"): {"context_lengths"},
    ("gated_delta", "context_lengths"): {"context_lengths"},
    ("ssd", "context_lengths"): {"context_lengths"},
} | {
    (operator, argument): {producer}
    for operator in ("short_conv", "gated_delta", "ssd")
    for argument, producer in {
        "states": "state",
        "query_starts": "query_starts",
        "reads": "state_reads",
        "writes": "state_writes",
        "ends": "state_ends",
    }.items()
}
"""The entries of `functions.INDEX_PRODUCERS` for these operators. `state` is a recurrent state of the cache."""
WINDOW_INDEX_PRODUCERS = CACHE_INDEX_PRODUCERS | {
    ("kv_store", "slots"): {"window_slots"},
    ("rope_and_store", "slots"): {"window_slots"},
    ("paged_attention", "block_tables"): {"window_tables"},
}
"""As `CACHE_INDEX_PRODUCERS`, for the keys and values of layers with windows, which have blocks of their own."""

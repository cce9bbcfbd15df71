"""What the engine hands to a model: the tokens of one step and the cache they read and write.

T tokens of S sequences, M blocks in the longest block table, N blocks of B slots, G key/value heads, D channels per key head,
E per value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One step's tokens, flattened: sequence s owns rows query_starts[s] to query_starts[s+1]. No padding. All int64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T] from 0 in each sequence
    slots: Tensor  # [T] where each token's key and value go in the cache
    block_tables: Tensor  # [S, M] padded with 0; context_lengths says how much counts
    query_starts: Tensor  # [S+1]
    context_lengths: Tensor  # [S] tokens in the cache after this step
    prompt_lengths: Tensor  # [T] length of the token's own prompt: dynamic rotary scaling depends on it
    prompt_marks: Tensor  # [S, K] what the model's `mark_prompt` said of each sequence's prompt
    output_rows: Tensor  # [R] rows of the tokens whose hidden states and logits are wanted


LayerCache: TypeAlias = tuple[Tensor, Tensor]
"""One layer's keys [N, B, G, D] and values [N, B, G, E]."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all sequences, one pair of paged tensors per layer. Allocated by the engine, filled by the model."""

    keys: list[Tensor]  # per layer [N, B, G, D]
    values: list[Tensor]  # per layer [N, B, G, E]

    @property
    def layers(self) -> Iterator[LayerCache]:
        return zip(self.keys, self.values, strict=True)

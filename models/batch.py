"""What the engine hands to a model: the tokens of one step and the cache they read and write.

T tokens of S sequences, M blocks in the longest block table, N blocks of B slots, G key/value heads.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.kv_format import PagedVectors


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


LayerCache: TypeAlias = tuple[PagedVectors, PagedVectors]
"""One layer's keys and values."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all sequences. Allocated by the engine, filled by the model."""

    layers: list[LayerCache]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored, each [N, B, G, *]."""
        return [tensor for keys, values in self.layers for tensor in keys.tensors + values.tensors]

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.layers[0][0].dtype

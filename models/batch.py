"""What the engine hands to a model: the tokens of one step and the cache they read and write.

T tokens of S sequences, M blocks in the longest block table, N blocks of B slots, G key/value heads.
"""

import itertools
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.kv_format import PagedVectors


@dataclass(frozen=True)
class Batch:
    """One step's tokens, flattened: sequence s owns rows query_starts[s] to query_starts[s+1]. No padding. All int64."""

    numbers: Tensor  # all that follows, one behind the other: one copy takes a batch elsewhere
    token_ids: Tensor  # [T]
    positions: Tensor  # [T] from 0 in each sequence
    slots: Tensor  # [T] where each token's key and value go in the cache
    block_tables: Tensor  # [S, M] padded with 0; context_lengths says how much counts
    query_starts: Tensor  # [S+1]
    context_lengths: Tensor  # [S] tokens in the cache after this step
    prompt_lengths: Tensor  # [T] length of the token's own prompt: dynamic rotary scaling depends on it
    prompt_marks: Tensor  # [S, K] what the model's `mark_prompt` said of each sequence's prompt
    output_rows: Tensor  # [R] rows of the tokens whose hidden states and logits are wanted

    @staticmethod
    def of(
        token_ids: list[int],
        positions: list[int],
        slots: list[int],
        block_tables: list[list[int]],
        query_starts: list[int],
        context_lengths: list[int],
        prompt_lengths: list[int],
        prompt_marks: list[tuple[int, ...]],
        output_rows: list[int],
    ) -> "Batch":
        """On the CPU."""
        num_sequences = len(context_lengths)
        longest = max(map(len, block_tables))
        width = 1 << (longest - 1).bit_length()  # a power of two, so that decode steps have few different shapes
        tables = [block for table in block_tables for block in (*table, *[0] * (width - len(table)))]
        marks = list(itertools.chain(*prompt_marks))
        fields = (
            token_ids,
            positions,
            slots,
            tables,
            query_starts,
            context_lengths,
            prompt_lengths,
            marks,
            output_rows,
        )
        numbers = torch.tensor(list(itertools.chain(*fields)), dtype=torch.int64)
        ids, places, into, table, starts, contexts, prompts, mark, rows = numbers.split(
            [len(field) for field in fields]
        )
        by_sequence = table.view(num_sequences, width), mark.view(num_sequences, len(marks) // num_sequences)
        return Batch(numbers, ids, places, into, by_sequence[0], starts, contexts, prompts, by_sequence[1], rows)


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

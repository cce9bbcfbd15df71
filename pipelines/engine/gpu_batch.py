"""Batches on their way to a GPU: in pinned memory, copied at once, and with rows that pad them to the size of a captured step.

T tokens of S sequences, M blocks in a table, K marks of a prompt, R output rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.batch import Batch

ALIGNMENT = 2  # numbers, which are 16 bytes: Triton compiles anew for an address that is no multiple of them

PADDING = {  # of the rows behind a batch's own: sequences without new tokens, which see nothing and are stored nowhere
    "token_ids": 0,
    "positions": 0,
    "slots": -1,
    "context_lengths": 0,
    "prompt_lengths": 1,
    "prompt_marks": 0,
    "output_rows": 0,
}


class BatchShape(NamedTuple):
    num_tokens: int
    num_sequences: int
    table_width: int
    num_marks: int
    num_outputs: int

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a batch's fields, tables last: of fewer sequences in the same memory, the numbers before tables stay where they are."""
        tokens, sequences, width, marks, outputs = self
        return {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "slots": (tokens,),
            "query_starts": (sequences + 1,),
            "context_lengths": (sequences,),
            "prompt_lengths": (tokens,),
            "prompt_marks": (sequences, marks),
            "output_rows": (outputs,),
            "block_tables": (sequences, width),
        }

    @property
    def num_numbers(self) -> int:
        """Numbers of a batch, with those that align its fields."""
        return sum(_aligned(math.prod(shape)) for shape in self.fields.values())


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def batch_over(numbers: Tensor, shape: BatchShape) -> Batch:
    """A batch of this shape in the memory of `numbers`, int64 [shape.num_numbers] at least."""
    parts, start = {}, 0
    for name, size in shape.fields.items():
        count = math.prod(size)
        parts[name] = numbers[start : start + count].view(size)
        start += _aligned(count)
    return Batch(numbers[:start], **parts)


def fill(target: Batch, batch: Batch) -> None:
    """Put a batch into one with as many sequences and as wide tables at least, and padding behind it.

    What stands in tables where a sequence has no blocks stays: nobody reads it.
    """
    for name, padding in PADDING.items():
        to, values = getattr(target, name), getattr(batch, name)
        to[: len(values)] = values
        to[len(values) :] = padding
    starts, width = batch.query_starts, min(batch.block_tables.shape[1], target.block_tables.shape[1])
    target.query_starts[: len(starts)] = starts
    target.query_starts[len(starts) :] = starts[-1]
    target.block_tables[: len(batch.block_tables), :width] = batch.block_tables[:, :width]


def to_gpu(batch: Batch, device: torch.device) -> Batch:
    """Without waiting for the GPU."""
    num_sequences, width = batch.block_tables.shape
    num_marks, num_outputs = batch.prompt_marks.shape[1], len(batch.output_rows)
    shape = BatchShape(len(batch.token_ids), num_sequences, width, num_marks, num_outputs)
    pinned = batch_over(torch.empty(shape.num_numbers, dtype=torch.int64, pin_memory=True), shape)
    fill(pinned, batch)
    return batch_over(pinned.numbers.to(device, non_blocking=True), shape)

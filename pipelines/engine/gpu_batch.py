"""Batches on their way to a GPU: in pinned memory, copied at once, and with rows that pad them to the size of a captured step."""

import torch

from models.batch import Batch

PADDING = {  # of the rows behind a batch's own: sequences without new tokens, which see nothing and are stored nowhere
    "token_ids": 0,
    "positions": 0,
    "slots": -1,
    "context_lengths": 0,
    "prompt_lengths": 1,
    "prompt_marks": 0,
    "output_rows": 0,
}


def fill(target: Batch, batch: Batch) -> None:
    """Put a batch into one with as many sequences and as wide tables at least, and padding behind it.

    What stands in tables where a sequence has no blocks stays: nobody reads it.
    """
    for name, padding in PADDING.items():
        to, values = getattr(target, name), getattr(batch, name)
        to[: len(values)] = values
        to[len(values) :] = padding
    for name in ("query_starts", "output_starts"):
        to, starts = getattr(target, name), getattr(batch, name)
        to[: len(starts)] = starts
        to[len(starts) :] = starts[-1]
    width = min(batch.block_tables.shape[1], target.block_tables.shape[1])
    target.block_tables[: len(batch.block_tables), :width] = batch.block_tables[:, :width]


def to_gpu(batch: Batch, device: torch.device) -> Batch:
    """Without waiting for the GPU."""
    return Batch(batch.numbers.pin_memory().to(device, non_blocking=True), batch.shape)

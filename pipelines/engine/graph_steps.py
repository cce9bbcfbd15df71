"""Decode steps as CUDA graphs of a few sizes, captured before the first request.

A batch runs in the smallest graph that fits it. Dimensions: S sequences of a batch, E hidden channels, V vocabulary
entries.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from models.batch import Batch, BatchShape
from pipelines.engine.steps import StepOutputs, Steps

log = logging.getLogger(__name__)

PADDING = {  # values of padding rows: sequences without new tokens, which attend to nothing and store nothing
    "token_ids": 0,
    "positions": 0,
    "slots": -1,
    "context_lengths": 0,
    "prompt_lengths": 1,
    "prompt_features": 0,
    "output_rows": 0,
    "adapter_slots": -1,
    "state_reads": -1,
    "state_writes": -1,
    "state_ends": 0,
    "window_slots": -1,
}


def graph_sizes(max_sequences: int) -> list[int]:
    """Return the captured numbers of sequences: 1, 2, 4, multiples of 8, and `max_sequences`."""
    return [*(size for size in (1, 2, 4, *range(8, max_sequences, 8)) if size < max_sequences), max_sequences]


class GraphSteps:
    """Decode steps with one token per sequence: one copy from pinned memory and one graph launch.

    Block tables have the maximum width of a sequence, because the grid of paged attention depends on the width.
    """

    def __init__(
        self,
        compute: Steps,
        capture: Callable[[Callable[[], None]], Callable[[], None]],
        max_sequences: int,
        table_width: int,
        num_prompt_features: int,
        device: torch.device,
        with_adapters: bool = False,
        is_recurrent: bool = False,
        is_windowed: bool = False,
    ) -> None:
        """Captures steps of all sizes; if a graph cannot hold the model's operations, captures none and logs a warning.

        `capture` returns a function that repeats the computation on the current content of the inputs. `with_adapters`:
        capture steps for batches with adapters. `is_recurrent`: whether the model has recurrent layers. `is_windowed`:
        whether layers with windows have blocks of their own.
        """
        self._compute = compute
        self._sizes = graph_sizes(max_sequences)
        shapes = {
            size: BatchShape(
                *(size, size, table_width, num_prompt_features, size),
                *(size * with_adapters, size * is_recurrent, size * is_windowed),
            )
            for size in self._sizes
        }
        count, on_gpu = shapes[max_sequences].num_numbers, device.type == "cuda"
        pinned = torch.zeros(count, dtype=torch.int64, pin_memory=on_gpu)
        numbers = torch.zeros(count, dtype=torch.int64, device=device)
        self._pinned = {size: Batch(pinned[: shape.num_numbers], shape) for size, shape in shapes.items()}
        self._inputs = {size: Batch(numbers[: shape.num_numbers], shape) for size, shape in shapes.items()}
        self._sent = torch.cuda.Event() if on_gpu else None
        self._replays: dict[int, Callable[[], None]] = {}
        try:
            self._capture_all(capture)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("decode steps are launched one by one, because a CUDA graph cannot hold them: %s", error)
            self._replays.clear()

    @property
    def sizes(self) -> list[int]:
        return sorted(self._replays)

    @torch.inference_mode()
    def _capture_all(self, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        largest, shape = self._sizes[-1], BatchShape(0, 0, 1, self._inputs[1].shape.num_prompt_features, 0)
        empty_batch = Batch(torch.zeros(shape.num_numbers, dtype=torch.int64), shape)
        self._send(empty_batch, largest)
        self._outputs = StepOutputs(*map(torch.empty_like, self._compute(self._inputs[largest], None)))
        for size in reversed(self._sizes):
            self._send(empty_batch, size)
            self._replays[size] = capture(partial(self._step, size))

    def _step(self, size: int) -> None:
        """Compute into the shared outputs. Nothing else of a step is kept, so graphs of all sizes can share memory."""
        for output, values in zip(self._outputs, self._compute(self._inputs[size], None), strict=True):
            output[:size].copy_(values)

    def _send(self, batch: Batch, size: int) -> None:
        if self._sent:
            self._sent.synchronize()  # the last copy from pinned memory has finished
        fill(self._pinned[size], batch)
        self._inputs[size].numbers.copy_(self._pinned[size].numbers, non_blocking=True)
        if self._sent:
            self._sent.record()

    def __call__(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        num_sequences = batch.shape.num_sequences
        if not self._replays or not num_sequences == batch.shape.num_tokens <= self._sizes[-1]:
            return self._compute(batch, token_ids)
        size = self._sizes[bisect_left(self._sizes, num_sequences)]
        self._send(batch, size)
        if token_ids is not None:
            self._inputs[size].token_ids[:num_sequences].copy_(token_ids)
        self._replays[size]()
        return StepOutputs(*(output[:num_sequences] for output in self._outputs))


def fill(target: Batch, batch: Batch) -> None:
    """Copy a batch into a `target` with at least as many sequences and as wide tables, and pad the rest.

    Entries of a table after a sequence's blocks keep their old values: no kernel reads them.
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
    for to, tables in (target.block_tables, batch.block_tables), (target.window_tables, batch.window_tables):
        to[: len(tables), :width] = tables[:, :width]

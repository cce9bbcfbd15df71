"""Decode steps as CUDA graphs of a few sizes, all captured before the first request; a batch runs in the smallest that holds it.

S sequences of a batch, E hidden channels, V tokens in the vocabulary.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.all_finite import all_finite
from models.batch import Batch, BatchShape
from pipelines.engine.captured_steps import Outputs
from pipelines.engine.gpu_batch import fill

log = logging.getLogger(__name__)


class Graph(Protocol):
    def replay(self) -> None: ...


class Pool(Protocol):
    """`kernels.cuda_graph.GraphPool`."""

    def capture(self, compute: Callable[[], None]) -> Graph: ...


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences: 1, 2, 4, then every eighth, and `most`."""
    return [*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most]


class PaddedDecodeSteps:
    """A step is one copy from pinned memory and one launch.

    Tables are as wide as a sequence may ever need, because the grid of paged attention follows from their width.
    """

    def __init__(
        self,
        compute: Callable[[Batch], tuple[Tensor, Tensor]],
        pool: Pool,
        most_sequences: int,
        table_width: int,
        num_marks: int,
        device: torch.device,
    ) -> None:
        """`compute`: hidden states and logits of a batch's output rows.

        Captures steps of all sizes, or none, with a warning, where the model does what a graph cannot hold.
        """
        self._compute = compute
        self._sizes = graph_sizes(most_sequences)
        shapes = {size: BatchShape(size, size, table_width, num_marks, size) for size in self._sizes}
        count, on_gpu = shapes[most_sequences].num_numbers, device.type == "cuda"
        pinned = torch.zeros(count, dtype=torch.int64, pin_memory=on_gpu)
        numbers = torch.zeros(count, dtype=torch.int64, device=device)
        self._pinned = {size: Batch(pinned[: shape.num_numbers], shape) for size, shape in shapes.items()}
        self._inputs = {size: Batch(numbers[: shape.num_numbers], shape) for size, shape in shapes.items()}
        self._sent = torch.cuda.Event() if on_gpu else None
        self._graphs: dict[int, Graph] = {}
        try:
            self._capture_all(pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("decode steps are launched one by one, because a CUDA graph cannot hold them: %s", error)
            self._graphs.clear()

    @torch.inference_mode()
    def _capture_all(self, pool: Pool) -> None:
        largest, shape = self._sizes[-1], BatchShape(0, 0, 1, self._inputs[1].shape.num_marks, 0)
        nobody = Batch(torch.zeros(shape.num_numbers, dtype=torch.int64), shape)
        self._send(nobody, largest)
        hidden, logits = self._compute(self._inputs[largest])
        self._hidden, self._logits = torch.empty_like(hidden), torch.empty_like(logits)  # [S, E], [S, V]
        for size in reversed(self._sizes):
            self._send(nobody, size)
            self._graphs[size] = pool.capture(partial(self._step, size))

    def _step(self, size: int) -> None:
        """Of the pool's memory nothing is needed when this has run, so that all sizes can have the same."""
        hidden, logits = self._compute(self._inputs[size])
        self._hidden[:size].copy_(hidden)
        self._logits[:size].copy_(logits)

    def _send(self, batch: Batch, size: int) -> None:
        if self._sent:
            self._sent.synchronize()  # the last batch has left the pinned memory
        fill(self._pinned[size], batch)
        self._inputs[size].numbers.copy_(self._pinned[size].numbers, non_blocking=True)
        if self._sent:
            self._sent.record()

    def hold(self, num_sequences: int) -> bool:
        """Whether there is a step for so many."""
        return bool(self._graphs) and num_sequences <= self._sizes[-1]

    def run(self, batch: Batch, token_ids: Tensor | None = None) -> Outputs:
        """They are overwritten by the next call. `token_ids` [S], on the device, take the place of the batch's."""
        num_sequences = batch.shape.num_sequences
        size = self._sizes[bisect_left(self._sizes, num_sequences)]
        self._send(batch, size)
        if token_ids is not None:
            self._inputs[size].token_ids[:num_sequences].copy_(token_ids)
        self._graphs[size].replay()
        hidden, logits = self._hidden[:num_sequences], self._logits[:num_sequences]
        return hidden, logits, all_finite(logits)

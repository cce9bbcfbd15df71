"""Engines whose steps are padded as in a CUDA graph, or observed."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_rows

from models.adapters import has_adapters
from models.batch import Batch, BatchShape
from pipelines.engine import Engine
from pipelines.engine.graph_steps import GraphSteps
from pipelines.engine.steps import StepOutputs

CPU = torch.device("cpu")


def compute_again(compute: Callable[[], None]) -> Callable[[], None]:
    """Replace the capture of a graph: compute each time."""
    compute()
    return compute


def pad(engine: Engine, most: int) -> list[BatchShape]:
    """Pad the engine's decode steps. Return the list of the shapes of later steps."""
    executor, shapes = engine.executor, list[BatchShape]()
    executor.decode_steps = padded(engine, most, shapes)
    if has_adapters(executor.model):
        executor.adapted_steps = padded(engine, most, shapes, with_adapters=True)
    shapes.clear()
    return shapes


def padded(engine: Engine, most: int, shapes: list[BatchShape], with_adapters: bool = False) -> GraphSteps:
    """Steps that record their shapes. The CPU's kernels get only the true rows; the padding rows become NaN."""
    executor, is_recurrent = engine.executor, engine.capabilities.is_recurrent

    def compute(batch: Batch, token_ids: Tensor | None) -> StepOutputs:
        if batch.shape.num_sequences > most:  # has no graph
            return executor.compute(batch, token_ids)
        shapes.append(batch.shape)
        count = int((batch.slots >= 0).sum())
        assert batch.query_starts[count:].eq(count).all()
        for field in (batch.adapter_slots, batch.state_reads, batch.state_writes):
            assert field[count:].eq(-1).all()
        num_rows = max(count, 1)  # without true rows, one row gives the shapes of the outputs
        width, num_states = batch.block_tables.shape[1], num_rows * is_recurrent
        true = BatchShape(num_rows, num_rows, width, 0, num_rows, num_rows * with_adapters, num_states)
        rows = Batch(torch.zeros(10**4, dtype=torch.int64), true)
        for field in batch.shape.fields:
            part = getattr(rows, field)
            part.copy_(getattr(batch, field)[: len(part)])
        if not count:
            rows.query_starts[1], rows.slots[0], rows.context_lengths[0] = 1, 0, 1
            rows.block_tables.zero_()  # graphs of other sizes share the memory: block -1 lies before the cache
        hidden, logits, finite = executor.compute(rows)
        padding = (0, 0, 0, len(batch.token_ids) - count)
        hidden, logits = (pad_rows(output[:count], padding, value=torch.nan) for output in (hidden, logits))
        return StepOutputs(hidden, logits, pad_rows(finite[:count], padding[2:]))

    width = -(-engine.config.context.num_tokens // engine.block_size)
    return GraphSteps(compute, compute_again, most, width, 0, CPU, with_adapters, is_recurrent)


def look_ahead(engine: Engine) -> list[bool]:
    """Return, for each launched step, whether its inputs were only on the device."""
    engine.looks_ahead = True
    ahead, execute = [], engine.executor.execute

    def observed(batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        ahead.append(token_ids is not None)
        return execute(batch, token_ids)

    engine.executor.execute = observed  # type: ignore[method-assign]
    return ahead

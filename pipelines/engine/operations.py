"""The operations on a model and its KV cache, in addition to the steps of `Executor.execute`.

Dimensions: R output rows, E hidden channels, V vocabulary entries, T tokens, L layers, P slots, n blocks of B slots,
G key heads, D channels of a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.all_finite import all_finite
from kernels.copy_blocks import copy_blocks
from kernels.kv_store import kv_store
from models.batch import Batch
from pipelines.engine.executor import Executor, Operation
from pipelines.engine.faults import not_finite
from pipelines.engine.steps import StepOutputs


@dataclass(frozen=True)
class Execute(Operation[StepOutputs]):
    """Compute a step, as `Executor.execute` does."""

    batch: Batch

    def compute(self, executor: Executor) -> StepOutputs:
        return executor.step(self.batch)


@dataclass(frozen=True)
class ExecuteWithHidden(Operation[tuple[StepOutputs, Tensor]]):
    """Compute a step's outputs, and the hidden states [T, E] of all tokens."""

    batch: Batch
    all_rows: Batch
    """The same batch with every token as an output row."""

    def compute(self, executor: Executor) -> tuple[StepOutputs, Tensor]:
        if self.batch.shape.num_outputs == self.batch.shape.num_tokens:
            outputs = executor.step(self.batch)
            return outputs, outputs.hidden
        batch, hidden = executor.on_device(self.batch), executor.forward(self.all_rows)
        output_hidden = hidden[batch.output_rows]
        logits = executor.model.logits(output_hidden, batch)
        return StepOutputs(output_hidden, logits, all_finite(logits)), hidden


@dataclass(frozen=True)
class Hidden(Operation[Tensor]):
    """Compute hidden states [R, E] of the batch's output rows, in the model's dtype."""

    batch: Batch

    def compute(self, executor: Executor) -> Tensor:
        return executor.forward(self.batch)


@dataclass(frozen=True)
class HiddenFrom(Operation[Tensor]):
    """Compute hidden states [R, E] as `Hidden` does, but from given embeddings instead of the batch's token ids."""

    batch: Batch
    embeddings: Tensor
    """[T, E], one for each token of the batch."""

    def compute(self, executor: Executor) -> Tensor:
        handle = executor.model.embedding.register_forward_hook(lambda *_: self.embeddings)
        try:
            return executor.forward(self.batch)
        finally:
            handle.remove()


@dataclass(frozen=True)
class Logits(Operation[Tensor]):
    """Compute logits [R, V] of hidden states [R, E]."""

    hidden: Tensor

    def compute(self, executor: Executor) -> Tensor:
        return executor.model.logits(self.hidden)


def finite_logits(executor: Executor, hidden: Tensor) -> Tensor:
    """Compute logits [R, V] of hidden states [R, E]. Raises UserError if a logit is not finite."""
    logits = executor.run(Logits(hidden))
    if not all_finite(logits).all():
        raise not_finite()
    return logits


@dataclass(frozen=True)
class PredictAhead(Operation[Tensor]):
    """Compute hidden states [R, E] of the multi-token prediction layer, as `CausalLM.predict_ahead` does."""

    hidden: Tensor
    batch: Batch

    def compute(self, executor: Executor) -> Tensor:
        return executor.model.predict_ahead(self.hidden, executor.on_device(self.batch), executor.cache)


@dataclass(frozen=True)
class ClearAhead(Operation[None]):
    """Zero the keys and values of the multi-token prediction layer."""

    def compute(self, executor: Executor) -> None:
        for stored in executor.cache.attention_layers[-1]:
            for tensor in stored.tensors:
                tensor.zero_()


@dataclass(frozen=True)
class CopyBlocks(Operation[None]):
    """Copy blocks of the cache in all layers. Copies are pairs of source and target."""

    copies: list[tuple[int, int]]
    window_copies: list[tuple[int, int]]
    """Of the layers with blocks of their own."""

    def compute(self, executor: Executor) -> None:
        cache = executor.cache
        for copies, part in (self.copies, cache.unwindowed), (self.window_copies, cache.windowed):
            if copies:
                sources, targets = torch.tensor(copies, device=executor.device).T
                for keys, values in part.attention_layers:
                    copy_blocks(keys, values, sources, targets)


@dataclass(frozen=True)
class Store(Operation[None]):
    """Write keys and values of all layers and key heads to slots of the cache, unchanged."""

    keys_and_values: Tensor
    """[L, 2, P, G, D]"""
    slots: list[int]

    def compute(self, executor: Executor) -> None:
        slots = torch.tensor(self.slots, device=executor.device)
        stage_values = executor.slice_local_layers(self.keys_and_values)
        for layer, heads, both in zip(
            executor.cache.attention_layers, executor.model.attention_heads, stage_values, strict=True
        ):
            keys, values = heads.slice_keys(both, axis=2)
            kv_store(keys, values, *layer, slots)


@dataclass(frozen=True)
class WriteBlocks(Operation[None]):
    """Write `content` to blocks of the cache tensor `name` (`Executor.cache_tensors`).

    A pipeline stage without this tensor does nothing.
    """

    name: str
    content: Tensor
    """[n, B, G, *], of all key heads of the model."""
    blocks: list[int]

    def compute(self, executor: Executor) -> None:
        if self.name in executor.cache_tensors:
            tensor, heads = executor.cache_tensors[self.name]
            tensor[self.blocks] = heads.slice_keys(self.content, axis=2).to(executor.device)


@dataclass(frozen=True)
class WriteState(Operation[None]):
    """Write `content` to a slot of the recurrent state `name` (`Executor.cache_states`)."""

    name: str
    content: Tensor
    slot: int

    def compute(self, executor: Executor) -> None:
        executor.cache_states[self.name][self.slot] = self.content.to(executor.device)


OPERATIONS = (
    Execute,
    ExecuteWithHidden,
    Hidden,
    HiddenFrom,
    Logits,
    PredictAhead,
    ClearAhead,
    CopyBlocks,
    Store,
    WriteBlocks,
    WriteState,
)

"""The steps that compare an exported model with its source model."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.lora import AdapterTable
from models.adapters import adaptable_layers
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from models.layers.lora_target import LoRATarget
from pipelines.engine.batch import prompt_batch

NUM_BLOCKS, BLOCK_SIZE = 8, 16
NUM_STATE_SLOTS = NUM_BLOCKS
RANKS = [(3, 0), (3, 2)]
"""Ranks of the two adapters, for alternate layers.

In every second layer the second adapter has rank 0, so it has no effect.
"""


class Results(NamedTuple):
    outputs: list[Tensor]
    """Hidden states and logits of each step."""
    stored: list[Tensor]
    """Contents of the cache after the steps without adapters, and after the steps with adapters."""


@dataclass(frozen=True)
class Steps:
    batches: list[Batch]
    factors: dict[str, list[tuple[Tensor, Tensor]]]
    """For each adaptable layer, by name: A [r, I] and B [O, r] of both adapters."""

    @staticmethod
    def of(model: CausalLM) -> "Steps":
        """Return steps for the whole model, which may be on the meta device."""
        generator, factors = torch.Generator().manual_seed(1), dict[str, list[tuple[Tensor, Tensor]]]()
        for (name, layer), ranks in zip(adaptable_layers(model).items(), itertools.cycle(RANKS)):
            outputs, inputs = layer.shape
            factors[name] = [
                (
                    torch.randn(rank, inputs, generator=generator) / 8,
                    torch.randn(outputs, rank, generator=generator) / 8,
                )
                for rank in ranks
            ]
        config = model.config
        is_recurrent = config.capabilities.is_recurrent
        return Steps(_batches(config.vocab_size, model.num_prompt_features, is_recurrent), factors)

    @torch.inference_mode()
    def results(self, model: CausalLM, cache: KVCache) -> Results:
        """Run the steps in order from an empty cache, first without and then with adapters, and return the results.

        The model may be a rank's shard.
        """
        layers, results = adaptable_layers(model), Results([], [])
        for are_adapted in (False, True):
            for name, layer in layers.items():
                layer.adapters = self._table(name, layer, cache.dtype) if are_adapted else None
            for part in (*cache.tensors, *cache.states):
                part.zero_()
            for batch in map(_adapted, self.batches) if are_adapted else self.batches:
                hidden = model(batch, cache)
                results.outputs.extend((hidden.clone(), model.logits(hidden, batch).clone()))
            results.stored.extend(part.clone() for part in (*cache.tensors, *cache.states))
        return results

    def _table(self, name: str, layer: LoRATarget, dtype: torch.dtype) -> AdapterTable:
        (outputs, inputs), factors = layer.shape, self.factors[name]
        table = AdapterTable.empty(2, max(len(a) for a, _ in factors), inputs, outputs, dtype, torch.device("cpu"))
        for slot, (a, b) in enumerate(factors):
            table.put(slot, *layer.slice_factors(a, b), 0.5)
        return table


def _batches(vocab_size: int, num_features: int = 0, is_recurrent: bool = False) -> list[Batch]:
    """Return steps of varied shapes: a ragged prefill, one token, one prompt, a prompt in two parts, several rows.

    Each prompt's features are the positions of its last tokens. With `is_recurrent`, a prompt writes its states into
    the slot of its first block's number. A later step writes them into another slot, and includes only its first token,
    as if later tokens were drafts.
    """
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(vocab_size, (64,), generator=generator).tolist()

    def features(lengths: list[int]) -> list[tuple[int, ...]]:
        return [tuple(max(0, length - 1 - number) for number in range(num_features)) for length in lengths]

    def prompts(lengths: list[int], num_outputs: list[int], tables: list[list[int]]) -> Batch:
        starts = [0, *itertools.accumulate(lengths)]
        texts = [ids[start : start + length] for start, length in zip(starts, lengths, strict=False)]
        batch = prompt_batch(texts, num_outputs, tables, features(lengths), BLOCK_SIZE, is_recurrent)
        batch.state_writes.copy_(torch.tensor([table[0] for table in tables] * is_recurrent))
        return batch

    def later(
        tokens: list[int], places: list[int], tables: list[list[int]], starts: list[int], outputs: list[int]
    ) -> Batch:
        owners = [s for s, (start, end) in enumerate(itertools.pairwise(starts)) for _ in range(start, end)]
        slots = [tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in zip(owners, places, strict=True)]
        lengths = [places[end - 1] + 1 for end in starts[1:]]
        output_counts = [sum(row < end for row in outputs) for end in starts]
        before = features([places[start] for start in starts[:-1]])
        reads = [table[0] for table in tables] * is_recurrent
        return Batch.of(
            tokens,
            places,
            slots,
            tables,
            starts,
            lengths,
            [20] * len(tokens),
            before,
            outputs,
            output_counts,
            state_reads=reads,
            state_writes=[NUM_STATE_SLOTS - 1 - slot for slot in reads],
            state_ends=[start + 1 for start in starts[:-1]] * is_recurrent,
        )

    first = prompts([3, 1, 5], [1, 1, 3], [[0], [1], [2]])
    decode = later(ids[:3], [3, 1, 5], [[0], [1], [2]], [0, 1, 2, 3], [0, 1, 2])
    alone, last = prompts([1], [1], [[3]]), prompts([19], [1], [[4, 5]])
    continuation = later(ids[20:24], [19, 20, 21, 22], [[4, 5]], [0, 4], [3])
    return [_with_window_blocks(batch) for batch in (first, decode, alone, last, continuation)]


def _with_window_blocks(batch: Batch) -> Batch:
    """Return the step with other blocks for layers with windows, so that a wrong table gives other bits."""
    offsets, last = batch.slots % BLOCK_SIZE, NUM_BLOCKS - 1
    slots, tables = (last - batch.slots // BLOCK_SIZE) * BLOCK_SIZE + offsets, last - batch.block_tables
    return _changed(batch, window_slots=slots.tolist(), window_tables=tables.tolist())


def _adapted(batch: Batch) -> Batch:
    """Return the step with the first adapter, the second adapter and no adapter in rotation."""
    slots = [token % 3 - 1 for token in range(1, batch.shape.num_tokens + 1)]
    return _changed(batch, adapter_slots=slots)


def _changed(batch: Batch, **fields: Any) -> Batch:
    return Batch.of(**{name: getattr(batch, name).tolist() for name in batch.shape.fields} | fields)


def differing(tensors: Sequence[Tensor], other_tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first pair of tensors whose bits differ; None if all are equal."""
    for number, pair in enumerate(zip(tensors, other_tensors, strict=True)):
        if not torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in pair)):
            return number
    return None

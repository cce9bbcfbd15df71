"""The input of one model step: its tokens, and the KV cache that they read and write.

T tokens of S sequences, M blocks in the longest block table, N blocks of B slots, G key/value heads.
"""

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.kv_format import PagedVectors

WINDOW_FIELDS = {"window_slots": "slots", "window_tables": "block_tables"}
"""The fields of the layers with windows, and the fields that they replace in `Batch.select_window_blocks`."""
ALIGNMENT = 2  # in int64 numbers, which is 16 bytes: Triton recompiles a kernel if an address loses this alignment


class BatchShape(NamedTuple):
    num_tokens: int
    num_sequences: int
    table_width: int
    num_prompt_features: int
    num_outputs: int
    num_adapted: int = 0
    """`num_tokens` if any token has an adapter, else 0. A step without adapters has no adapter field."""
    num_states: int = 0
    """`num_sequences` if the model has recurrent layers, else 0."""
    num_windowed: int = 0
    """`num_sequences` if the layers with sliding windows have blocks of their own, else 0."""

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a batch's fields, in memory order.

        Block tables are last, so that a wider table moves no other field.
        """
        tokens, sequences, width, features, outputs, adapted, states, windowed = self
        return {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "slots": (tokens,),
            "query_starts": (sequences + 1,),
            "context_lengths": (sequences,),
            "prompt_lengths": (tokens,),
            "prompt_features": (sequences, features),
            "output_rows": (outputs,),
            "output_starts": (sequences + 1,),
            "adapter_slots": (adapted,),
            "state_reads": (states,),
            "state_writes": (states,),
            "state_ends": (states,),
            "window_slots": (tokens if windowed else 0,),
            "block_tables": (sequences, width),
            "window_tables": (windowed, width),
        }

    @property
    def num_numbers(self) -> int:
        """The number of int64 numbers in a batch, including padding between fields."""
        return sum(_aligned(math.prod(shape)) for shape in self.fields.values())


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class _Field:
    """A view of part of a batch's numbers. The first access creates all views; a replayed step creates none."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: "Batch", owner: type) -> Tensor:
        start = 0
        for name, shape in batch.shape.fields.items():
            count = math.prod(shape)
            view = batch.numbers[start : start + count].view(shape)
            setattr(batch, WINDOW_FIELDS.get(name, name) if batch._is_windowed else name, view)  # hides this descriptor
            start += _aligned(count)
        field: Tensor = getattr(batch, self._name)
        return field


class Batch:
    """The tokens of one step without padding, all int64. Sequence s owns rows query_starts[s] to query_starts[s+1]."""

    token_ids = _Field()  # [T]
    positions = _Field()  # [T] counted from 0 in each sequence, or from the position that a prefix sets
    slots = _Field()  # [T] the cache slot of each token's key and value
    query_starts = _Field()  # [S+1]
    context_lengths = _Field()  # [S] tokens in the cache after this step
    # [T] The prompt length of the token's sequence; the sequence's length once it exceeds `long_rope_threshold`; 0
    # after a soft prefix. Long RoPE and dynamic scaling depend on it.
    prompt_lengths = _Field()
    prompt_features = _Field()  # [S, K] the result of the model's `prompt_features` for each sequence's prompt
    output_rows = _Field()  # [R] rows that need hidden states and logits: the last tokens of each sequence
    output_starts = _Field()  # [S+1] sequence s owns output rows output_starts[s] to output_starts[s+1]
    adapter_slots = _Field()  # [T] slot of each token's adapter, -1: none; empty if no token has an adapter
    state_reads = _Field()  # [S] slot of each sequence's recurrent state before the step, -1: its first token is new
    state_writes = _Field()  # [S] slot of its state after the step, -1: the state is not kept
    state_ends = _Field()  # [S] the state after the step includes the rows before this one; drafts follow
    window_slots = _Field()  # [T] as `slots`, of the layers with windows; empty if all layers have the same blocks
    block_tables = _Field()  # [S, M] padded with 0; context_lengths tells how many entries are valid
    window_tables = _Field()  # [S, M] as `block_tables`, of the layers with windows; 0 before the window

    def __init__(
        self, numbers: Tensor, shape: BatchShape, only_outputs_attend: bool = False, is_windowed: bool = False
    ) -> None:
        """Take the int64 numbers of all fields in one tensor, so that one copy moves the batch to a device."""
        self.numbers, self.shape = numbers, shape
        self._only_outputs_attend, self._is_windowed = only_outputs_attend, is_windowed
        self._output_slots: Tensor | None = None

    def select_output_rows(self) -> "Batch":
        """Return the batch for the model's last layer, in which only output rows attend."""
        if self.shape.num_outputs == self.shape.num_tokens:
            return self
        return Batch(self.numbers, self.shape, True, self._is_windowed)

    def select_window_blocks(self) -> "Batch":
        """Return the batch for layers with windows: `slots` and `block_tables` are of their blocks."""
        if not self.shape.num_windowed:
            return self
        return Batch(self.numbers, self.shape, self._only_outputs_attend, is_windowed=True)

    def attending(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, *] that attend: all rows, or the output rows [R, *]."""
        return x[self.output_rows] if self._only_outputs_attend else x

    def adapter_slots_of(self, num_rows: int) -> Tensor | None:
        """Return the adapter slot of each row, or None if no token has an adapter.

        The rows are all tokens if `num_rows` is T, else the output rows.
        """
        if not self.shape.num_adapted or num_rows == self.shape.num_tokens:
            return self.adapter_slots if self.shape.num_adapted else None
        if self._output_slots is None:
            self._output_slots = self.adapter_slots[self.output_rows]
        return self._output_slots

    @property
    def attending_starts(self) -> Tensor:
        """Row offsets [S+1] of the sequences among the attending rows, as `query_starts` among all rows."""
        return self.output_starts if self._only_outputs_attend else self.query_starts

    @property
    def owners(self) -> Tensor:
        """The sequence of each token [T]. Padding rows belong to the last sequence."""
        tokens = torch.arange(self.positions.shape[0], device=self.positions.device)
        sequences = torch.bucketize(tokens, self.query_starts[1:], right=True)  # a padding row gets S
        return sequences.clamp(max=self.context_lengths.shape[0] - 1)

    @property
    def origins(self) -> Tensor:
        """The cache index [S] of each sequence's position 0.

        It is above 0 after a soft prefix, which has no positions.
        """
        return self.context_lengths - 1 - self.positions[self.query_starts[1:] - 1]

    @staticmethod
    def of(
        token_ids: list[int],
        positions: list[int],
        slots: list[int],
        block_tables: list[list[int]],
        query_starts: list[int],
        context_lengths: list[int],
        prompt_lengths: list[int],
        prompt_features: list[tuple[int, ...]],
        output_rows: list[int],
        output_starts: list[int],
        adapter_slots: Sequence[int] = (),
        state_reads: Sequence[int] = (),
        state_writes: Sequence[int] = (),
        state_ends: Sequence[int] = (),
        window_slots: Sequence[int] = (),
        window_tables: Collection[list[int]] = (),
    ) -> "Batch":
        """Create a batch on the CPU. Fields with a default may be empty, as in `BatchShape`."""
        longest = max(map(len, block_tables))
        width = 1 << (longest - 1).bit_length()  # a power of two, so that decode steps have few distinct shapes
        fields = (
            token_ids,
            positions,
            slots,
            query_starts,
            context_lengths,
            prompt_lengths,
            [feature for features in prompt_features for feature in features],
            output_rows,
            output_starts,
            adapter_slots,
            state_reads,
            state_writes,
            state_ends,
            window_slots,
            _padded(block_tables, width),
            _padded(window_tables, width),
        )
        numbers: list[int] = []
        for field in fields:
            numbers += field
            while len(numbers) % ALIGNMENT:
                numbers.append(0)
        sizes = len(token_ids), len(block_tables), width, len(prompt_features[0]), len(output_rows)
        shape = BatchShape(*sizes, len(adapter_slots), len(state_reads), len(window_tables))
        return Batch(torch.frombuffer(array("q", numbers), dtype=torch.int64), shape)


def _padded(tables: Iterable[list[int]], width: int) -> list[int]:
    numbers: list[int] = []
    for table in tables:
        numbers += table
        numbers += [0] * (width - len(table))
    return numbers


LayerCache: TypeAlias = tuple[PagedVectors, PagedVectors]
"""The keys and the values of one attention layer."""


class StateShape(NamedTuple):
    """A state of one sequence in a recurrent layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    """None: the model's dtype."""


StateShapes: TypeAlias = tuple[StateShape, ...]
"""The states of one sequence in a recurrent layer."""


class LayerState(NamedTuple):
    """The states of all sequences in one recurrent layer."""

    tensors: tuple[Tensor, ...]
    """Each [P, *], of P slots."""


class MixedCache(NamedTuple):
    """The cache of a layer that has attention and a recurrent module."""

    attention: LayerCache
    recurrent: LayerState


AnyCache: TypeAlias = LayerCache | LayerState | MixedCache


def join_cache(attention: LayerCache | None, recurrent: LayerState) -> AnyCache:
    """Return the cache of a layer, in the form that the layer takes. Without attention and states it has no tensors."""
    if attention is None:
        return recurrent
    return MixedCache(attention, recurrent) if recurrent.tensors else attention


def attention_cache(layer: AnyCache) -> LayerCache | None:
    """Return a layer's keys and values. None: the layer has no attention."""
    if isinstance(layer, LayerState):
        return None
    return layer.attention if isinstance(layer, MixedCache) else layer


def layer_states(layer: AnyCache) -> tuple[Tensor, ...]:
    """Return a layer's recurrent states, each [P, *]. An attention layer has none."""
    if isinstance(layer, LayerState):
        return layer.tensors
    return layer.recurrent.tensors if isinstance(layer, MixedCache) else ()


class CacheKind(NamedTuple):
    """The shape of a layer's cache for one token and one sequence."""

    vectors: tuple[int, int, int] | None
    """The key heads, and the channels of a key and of a value. None: the layer has no keys and values."""
    states: tuple[tuple[int, ...], ...]
    """The shapes of the recurrent states."""


def cache_kind(layer: AnyCache) -> CacheKind:
    attention, states = attention_cache(layer), tuple(tuple(tensor.shape[1:]) for tensor in layer_states(layer))
    if attention is None:
        return CacheKind(None, states)
    keys, values = attention
    return CacheKind((keys.tensors[0].shape[2], keys.channels, values.channels), states)


@dataclass(frozen=True)
class KVCache:
    """The keys, values and recurrent states of all sequences in a range of layers. The engine allocates them, the model
    writes them."""

    layers: Sequence[AnyCache]
    num_blocks: int
    block_size: int
    """The tokens of a block."""
    dtype: torch.dtype
    """The model's compute dtype."""
    num_slots: int = 0
    """The slots of each recurrent state; 0 if no layer of the model is recurrent."""
    num_window_blocks: int = 0
    """The blocks of the layers with sliding windows; 0 if all layers have the same blocks."""
    has_window_blocks: Sequence[bool] = ()
    """For each of `layers`, whether its blocks are `num_window_blocks`; empty if none is."""

    @property
    def attention_layers(self) -> list[LayerCache]:
        """The keys and values of the attention layers, in order."""
        return [*filter(None, map(attention_cache, self.layers))]

    @property
    def windowed(self) -> "KVCache":
        """The layers with blocks of their own."""
        layers = [layer for layer, is_windowed in zip(self.layers, self.has_window_blocks, strict=False) if is_windowed]
        return KVCache(layers, self.num_window_blocks, self.block_size, self.dtype)

    @property
    def unwindowed(self) -> "KVCache":
        """All other layers."""
        layers = [layer for layer, is_windowed in zip_longest(self.layers, self.has_window_blocks) if not is_windowed]
        return KVCache(layers, self.num_blocks, self.block_size, self.dtype, self.num_slots)

    @property
    def tensors(self) -> list[Tensor]:
        """The keys and values of all attention layers, each [N, B, G, *]."""
        return [tensor for keys, values in self.attention_layers for tensor in keys.tensors + values.tensors]

    @property
    def states(self) -> list[Tensor]:
        """The states of all recurrent layers, each [P, *]."""
        return [*chain.from_iterable(map(layer_states, self.layers))]

    def one_of_each_shape(self) -> "KVCache":
        """Return the cache of the first layer of each shape.

        For computing whole prompts layer by layer: all layers whose caches have one shape can use the same cache in turn.
        """
        return replace(self, layers=[*{cache_kind(layer): layer for layer in reversed(self.layers)}.values()])

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values."""
        return sum(tensor[0, 0].nbytes for tensor in self.tensors)

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of a sequence's recurrent states."""
        return sum(tensor[0].nbytes for tensor in self.states)

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors or self.states)).device

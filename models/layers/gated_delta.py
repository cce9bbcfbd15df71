"""Recurrent layers that compute the gated delta rule: Gated DeltaNet (arXiv 2412.06464) of Qwen3-Next and Qwen3.5, and
the parts that Kimi Delta Attention shares with it.

T tokens, R output rows, E hidden channels, H value heads of D channels, G key heads of N channels, K taps.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.gated_delta import gated_delta, state_shape
from kernels.quantize_rows import Activations
from kernels.short_conv import short_conv
from models.batch import Batch, LayerState, StateShape, StateShapes
from models.layers.depthwise_conv import DepthwiseConv
from models.layers.linear import Linear, swiglu_for
from models.layers.module import Module
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles
from models.sharding import Shard, shard_heads


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a gated delta rule. On a tensor-parallel rank these are the rank's heads only."""

    num_value_heads: int
    num_key_heads: int
    key_channels: int
    value_channels: int
    group: int
    """The consecutive value heads that share a key head. After the last key head, the first one follows again."""

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_channels

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_channels


class DeltaInputs(NamedTuple):
    qkv: Tensor
    """[T, 2 * G * N + H * D]"""
    output_gate: Tensor
    """[T, H * D]"""
    write_gate: Tensor
    """[T, H]"""
    decay: Tensor
    """[T, H], or [T, H * N]"""


class DeltaRule(Module):
    """finish(gated_delta(silu(conv(q, k, v)))). A subclass defines the projections before and after it."""

    dt_bias: nn.Parameter

    def __init__(self, hidden_size: int, heads: DeltaHeads, num_taps: int) -> None:
        super().__init__()
        self.register_projections(hidden_size, heads)
        self._set_heads(heads, num_taps, torch.get_default_device())

    @abstractmethod
    def register_projections(self, hidden_size: int, heads: DeltaHeads) -> None:
        """Create the linear layers that `project` uses."""

    @abstractmethod
    def register_parameters(self, heads: DeltaHeads, num_taps: int) -> None:
        """Create the convolution and the parameters of the heads."""

    @property
    @abstractmethod
    def taps(self) -> Tensor:
        """The weight of the convolution of q, k and v, [K, 2 * G * N + H * D]."""

    @property
    @abstractmethod
    def decay_log(self) -> Tensor:
        """[H]"""

    @abstractmethod
    def project(self, x: Activations, batch: Batch) -> DeltaInputs:
        """Return the projections of x [T, E]."""

    @abstractmethod
    def shard_projections(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        """Keep these heads of the input projections. Return the shards of their tensors by name."""

    @abstractmethod
    def parameter_shards(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        """Return the shards of these heads of the tensors of `register_parameters`, by name."""

    @abstractmethod
    def finish(self, mixed: Tensor, gate: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [R, E] of mixed and gate [R, H * D]."""

    def _set_heads(self, heads: DeltaHeads, num_taps: int, device: torch.device) -> None:
        self.heads, channels = heads, 2 * heads.key_size + heads.value_size
        with device:
            self.register_parameters(heads, num_taps)
        matrices = state_shape(heads.num_value_heads, heads.key_channels, heads.value_channels)
        self.state_shapes: StateShapes = (
            StateShape((num_taps - 1, channels)),
            StateShape(matrices, torch.float32),  # rounding accumulates
        )

    @property
    def num_heads(self) -> tuple[int, int]:
        """The numbers of value heads and of key heads. They are shared out as query heads and key heads are."""
        return self.heads.num_value_heads, self.heads.num_key_heads

    def shard(self, tp: int, rank: int) -> dict[str, Shard]:
        """Keep a rank's heads. Return the shards of all tensors except the output projection's, by name.

        Raises UserError for more ranks than value heads.
        """
        self.check_ranks(tp)
        layer_heads, num_taps = self.heads, len(self.taps)
        values = shard_heads(*self.num_heads, tp, rank).queries
        # in the order in which the rank's value heads use them
        keys = [*dict.fromkeys(head // layer_heads.group % layer_heads.num_key_heads for head in values)]
        shards = self.shard_projections(keys, values) | self.parameter_shards(keys, values)
        heads = replace(layer_heads, num_value_heads=len(values), num_key_heads=len(keys))
        self._set_heads(heads, num_taps, self.dt_bias.device)
        return shards

    def check_ranks(self, tp: int) -> None:
        """Raise UserError for more ranks than value heads."""
        check_ranks(tp, self.heads.num_value_heads, "value heads")

    def forward(self, x: Activations, _: Angles | None, batch: Batch, states: LayerState) -> Tensor:
        """Return [T, E], in the last layer [R, E]."""
        inputs, (last_inputs, matrices) = self.project(x, batch), states.tensors
        steps = batch.query_starts, batch.state_reads, batch.state_writes, batch.state_ends
        qkv = short_conv(inputs.qkv, self.taps, None, last_inputs, *steps)
        gates = inputs.decay, inputs.write_gate, self.decay_log, self.dt_bias
        sizes = self.heads.group, self.heads.value_channels
        mixed = gated_delta(qkv, *gates, matrices, *sizes, *steps, batch.context_lengths)
        return self.finish(batch.attending(mixed), batch.attending(inputs.output_gate), batch)


class GatedDeltaNet(DeltaRule):
    """out_proj(norm(gated_delta(silu(conv(q, k, v)))) * silu(output_gate)). A subclass defines the input projections."""

    def __init__(self, hidden_size: int, heads: DeltaHeads, num_taps: int, eps: float) -> None:
        super().__init__(hidden_size, heads, num_taps)
        self.norm = RMSNorm(heads.value_channels, eps)
        self.out_proj = Linear(heads.value_size, hidden_size, bias=False)

    def register_parameters(self, heads: DeltaHeads, num_taps: int) -> None:
        self.conv1d = DepthwiseConv(2 * heads.key_size + heads.value_size, num_taps, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(heads.num_value_heads))

    @property
    def taps(self) -> Tensor:
        return self.conv1d.taps

    @property
    def decay_log(self) -> Tensor:
        return self.A_log

    def parameter_shards(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        conv = {"conv1d.weight": Shard(0, qkv_ranges(self.heads, keys, values))}
        return conv | dict.fromkeys(("A_log", "dt_bias"), Shard(0, (values,)))

    def finish(self, mixed: Tensor, gate: Tensor, batch: Batch) -> Tensor:
        normed = self.norm(mixed.unflatten(1, (-1, self.heads.value_channels))).flatten(1)
        return self.out_proj(swiglu_for([self.out_proj], gate, normed), batch)


def check_ranks(tp: int, num_heads: int, heads: str) -> None:
    """Raise UserError for more ranks than `heads`."""
    if tp > num_heads:
        limit = f"the {num_heads} {heads} of a recurrent layer of this model"
        raise UserError(f"tp={tp} is more than {limit}: give at most {num_heads}")


def qkv_ranges(heads: DeltaHeads, keys: Sequence[int], values: Sequence[int]) -> tuple[range, ...]:
    """Return the channels of q, k and v that belong to these heads."""
    first_value = 2 * heads.key_size
    return (
        *head_ranges(keys, heads.key_channels),
        *head_ranges(keys, heads.key_channels, heads.key_size),
        *head_ranges(values, heads.value_channels, first_value),
    )


def head_ranges(heads: Iterable[int], width: int, start: int = 0) -> tuple[range, ...]:
    """Return the channels of each head, if the first head begins at `start`."""
    return tuple(range(start + head * width, start + (head + 1) * width) for head in heads)

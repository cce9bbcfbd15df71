"""Kimi Delta Attention (arXiv 2510.26692), a recurrent layer: the gated delta rule with a decay for each key channel.

T tokens, R output rows, E hidden channels, H heads of N channels, K taps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.gated_rms_norm import gated_rms_norm
from kernels.quantize_rows import Activations
from models.batch import Batch
from models.layers.depthwise_conv import DepthwiseConv
from models.layers.gated_delta import DeltaHeads, DeltaInputs, DeltaRule, head_ranges
from models.layers.linear import Linear, MergedLinear
from models.layers.norm import RMSNorm
from models.sharding import Shard

QKV = ("q", "k", "v")


class KimiDeltaAttention(DeltaRule):
    """o_proj(o_norm(gated_delta(silu(conv(q, k, v)))) * sigmoid(output_gate)).

    The projections of decay and output gate have rank N: f_b_proj(f_a_proj(x)) and g_b_proj(g_a_proj(x)).
    """

    def __init__(self, hidden_size: int, num_heads: int, head_channels: int, num_taps: int, eps: float) -> None:
        heads = DeltaHeads(num_heads, num_heads, head_channels, head_channels, group=1)
        super().__init__(hidden_size, heads, num_taps)
        self.o_norm = RMSNorm(head_channels, eps)
        self.o_proj = Linear(heads.value_size, hidden_size, bias=False)

    def register_projections(self, hidden_size: int, heads: DeltaHeads) -> None:
        size, rank = heads.value_size, heads.key_channels
        self.qkv = MergedLinear(self, {f"{part}_proj": Linear(hidden_size, size, bias=False) for part in QKV})
        sizes = {"f_a_proj": rank, "g_a_proj": rank, "b_proj": heads.num_value_heads}
        gates = {name: Linear(hidden_size, outputs, False, is_quantizable=False) for name, outputs in sizes.items()}
        self.gates = MergedLinear(self, gates)
        self.f_b_proj, self.g_b_proj = (Linear(rank, size, False, is_quantizable=False) for _ in range(2))

    def register_parameters(self, heads: DeltaHeads, num_taps: int) -> None:
        self._taps: Tensor | None = None
        convs = (DepthwiseConv(heads.value_size, num_taps, bias=False) for _ in QKV)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convs
        self.A_log = nn.Parameter(torch.empty(1, 1, heads.num_value_heads, 1))
        self.dt_bias = nn.Parameter(torch.empty(heads.value_size))

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return *self.qkv.layers, *self.gates.layers

    def fuse(self) -> None:
        self.qkv.merge()
        self.gates.merge()
        self._taps = self._join_taps()

    @property
    def taps(self) -> Tensor:
        return self._join_taps() if self._taps is None else self._taps

    def _join_taps(self) -> Tensor:
        return torch.cat([conv.taps for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)], 1)

    @property
    def decay_log(self) -> Tensor:
        return self.A_log.flatten()

    def project(self, x: Activations, batch: Batch) -> DeltaInputs:
        decay, output_gate, write_gate = self.gates(x, batch)
        decay, output_gate = self.f_b_proj(decay, batch), self.g_b_proj(output_gate, batch)
        return DeltaInputs(torch.cat((*self.qkv(x, batch),), 1), output_gate, write_gate, decay)

    def shard_projections(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        channels = head_ranges(values, self.heads.value_channels)
        layers = [*zip(("q_proj", "k_proj", "v_proj"), self.qkv.layers, strict=True)]
        layers += [("f_b_proj", self.f_b_proj), ("g_b_proj", self.g_b_proj)]
        shards = {
            f"{name}.{tensor}": shard for name, layer in layers for tensor, shard in layer.shard(channels).items()
        }
        write_gates = self.gates.layers[-1].shard((values,))
        return shards | {f"b_proj.{tensor}": shard for tensor, shard in write_gates.items()}

    def parameter_shards(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        channels = Shard(0, head_ranges(values, self.heads.value_channels))
        names = (*(f"{part}_conv1d.weight" for part in QKV), "dt_bias")
        return dict.fromkeys(names, channels) | {"A_log": Shard(2, (values,))}

    def finish(self, mixed: Tensor, gate: Tensor, batch: Batch) -> Tensor:
        channels, norm = self.heads.value_channels, self.o_norm
        mixed_heads, gate_heads = (part.unflatten(1, (-1, channels)).flatten(0, 1) for part in (mixed, gate))
        normed = gated_rms_norm(mixed_heads, gate_heads, norm.weight, channels, norm.eps, gates_output=True)
        return self.o_proj(normed.unflatten(0, (-1, self.heads.num_value_heads)).flatten(1), batch)

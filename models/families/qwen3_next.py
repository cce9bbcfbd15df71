"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated attention, with mixtures of experts.

T tokens, E hidden channels, G key heads.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from kernels.quantize_rows import Activations
from models.batch import Batch
from models.decoder import DecoderLayer, DecoderLM
from models.families.qwen2_moe import SharedExpertMoeBlock
from models.families.qwen3_next_config import HybridConfig, HybridMoeConfig
from models.layers.attention import Heads
from models.layers.gated_attention import GatedAttention
from models.layers.gated_delta import DeltaHeads, DeltaInputs, GatedDeltaNet, check_ranks, head_ranges
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layout import ModelLayout
from models.sharding import Shard


class JoinedDeltaNet(GatedDeltaNet):
    """The layer as Qwen3-Next's files store it: rows in the order of the key heads."""

    def register_projections(self, hidden_size: int, heads: DeltaHeads) -> None:
        widths = 2 * (heads.key_size + heads.value_size), 2 * heads.num_value_heads
        self.in_proj_qkvz = Linear(hidden_size, widths[0], bias=False)
        self.in_proj_ba = Linear(hidden_size, widths[1], bias=False, is_quantizable=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.in_proj_qkvz, self.in_proj_ba

    def project(self, x: Activations, batch: Batch) -> DeltaInputs:
        heads = self.heads
        key_size, value_size = heads.key_channels, heads.value_size // heads.num_key_heads  # of one key head
        by_key_head = self.in_proj_qkvz(x, batch).unflatten(1, (heads.num_key_heads, -1))
        parts = by_key_head.split((key_size, key_size, value_size, value_size), dim=2)
        q, k, v, gate = (part.flatten(1) for part in parts)
        write_gate, decay = self.in_proj_ba(x, batch).unflatten(1, (heads.num_key_heads, 2, -1)).unbind(2)
        return DeltaInputs(torch.cat((q, k, v), 1), gate, write_gate.flatten(1), decay.flatten(1))

    def check_ranks(self, tp: int) -> None:
        """Raise UserError for more ranks than key heads, whose rows are adjacent."""
        check_ranks(tp, self.heads.num_key_heads, "key heads")

    def shard_projections(self, keys: Sequence[int], values: range) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        for name, layer in (("in_proj_qkvz", self.in_proj_qkvz), ("in_proj_ba", self.in_proj_ba)):
            ranges = head_ranges(keys, layer.shape[0] // self.heads.num_key_heads)
            shards |= {f"{name}.{tensor}": shard for tensor, shard in layer.shard(ranges).items()}
        return shards


class DeltaLayer(DecoderLayer):
    names = ("input_layernorm", "linear_attn", "post_attention_layernorm", "mlp")


def make_layers(c: HybridConfig, delta_net: type[GatedDeltaNet], mlps: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Yield the layers. `mlps`: the feed-forward layer of each."""
    for is_recurrent, mlp in zip(c.recurrent_layers, mlps, strict=True):
        if is_recurrent:
            yield DeltaLayer(c, delta_net(c.hidden_size, c.heads, c.num_taps, c.rms_norm_eps), mlp)
        else:
            heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
            attention = GatedAttention(c.hidden_size, heads, c.rms_norm_eps, c.norm_weight_offset)
            yield DecoderLayer(c, attention, mlp)


def make_mixtures(c: HybridMoeConfig) -> Iterable[nn.Module]:
    for is_sparse in c.layer_kinds:
        if is_sparse:
            yield SharedExpertMoeBlock(c.hidden_size, c.mixture, c.shared_expert_intermediate_size)
        else:
            yield MLP(c.hidden_size, c.intermediate_size)


class HybridLM(DecoderLM):
    layout = ModelLayout(
        recurrent="linear_attn",
        norm_weight_offset=1.0,
        row_parallel=("o_proj", "out_proj", "down_proj"),
        replicated=("gate", "shared_expert_gate"),
    )
    float32_tensors = ("A_log", "dt_bias")

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        return ("mtp.",)  # the multi-token prediction layer


class Qwen3Next(HybridLM):
    def __init__(self, c: HybridMoeConfig) -> None:
        super().__init__(c, make_layers(c, JoinedDeltaNet, make_mixtures(c)))

"""Qwen3-Next (arXiv 2505.09388 and its model card): three layers of Gated DeltaNet, then one of gated attention.

T tokens, R output rows, E hidden channels, H query heads, G key/value heads, D channels per head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.families.qwen2_moe import SharedExpertMoeBlock
from models.layers.attention import Heads, attend
from models.layers.gate import sigmoid
from models.layers.gated_delta import DeltaHeads, DeltaInputs, GatedDeltaNet, check_ranks, head_ranges
from models.layers.layer_types import FULL, check_layer_types
from models.layers.linear import Linear, MergedLinear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import MixtureConfig, read_mixture
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, read_rotary_config
from models.layout import ModelLayout
from models.sharding import Shard

LINEAR = "linear_attention"


@dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    norm_weight_offset: ClassVar[float | None] = 1.0
    heads: DeltaHeads
    """Of the recurrent layers."""
    num_taps: int
    """The tokens that a convolution reads, with the token itself."""
    is_recurrent: tuple[bool, ...]
    """For each layer."""

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, is_recurrent=any(self.recurrent_layers))

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        return self.is_recurrent[: self.num_hidden_layers]


@dataclass(frozen=True)
class HybridMoeConfig(HybridConfig):
    mixture: MixtureConfig
    shared_expert_intermediate_size: int

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.mixture.sparse_layers[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> HybridMoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for contradicting kinds of layers.
    """
    shape = read_hybrid(config, intermediate_size=config.count("moe_intermediate_size"))
    mixture = read_mixture(config, shape.num_hidden_layers, norm_topk_prob=True)
    return HybridMoeConfig(
        **vars(shape),
        mixture=mixture,
        shared_expert_intermediate_size=config.count("shared_expert_intermediate_size"),
    )


def read_hybrid(config: ConfigReader, intermediate_size: int | None = None) -> HybridConfig:
    """Read the keys of all layers except the experts. Raises UserError as `read_config` does.

    `intermediate_size`: the default of a model whose layers are all mixtures.
    """
    for key, supported in (
        ("attention_bias", (False, None)),
        ("attn_output_gate", (True, None)),
        ("output_gate_type", ("swish", "silu", None)),
        ("mamba_ssm_dtype", ("float32", None)),
        ("use_sliding_window", (False, None)),
    ):
        config.expect(key, supported, None)
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.raw(key)  # of the multi-token prediction layer, which is not loaded
    config.count("head_dim")  # transformers defaults to 256
    read_rotary = partial(read_rotary_config, partial_rotary_factor=0.25)
    shape = read_decoder_config(config, 1e-6, read_rotary=read_rotary, intermediate_size=intermediate_size)
    values, keys = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    config.check_multiple("linear_num_value_heads", values, "linear_num_key_heads", keys)
    if (num_taps := config.count("linear_conv_kernel_dim", 4)) < 2:
        problem = f"config.json: linear_conv_kernel_dim={num_taps} keeps no earlier token"
        raise UserError(f"{problem}: give at least 2")
    key_channels, value_channels = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    types, interval = config.raw("layer_types"), config.count("full_attention_interval", 4)
    if types is None:
        types = [LINEAR if (i + 1) % interval else FULL for i in range(shape.num_hidden_layers)]
    return HybridConfig(
        **vars(shape),
        heads=DeltaHeads(values, keys, key_channels, value_channels, values // keys),
        num_taps=num_taps,
        is_recurrent=check_layer_types(types, LINEAR, shape.num_hidden_layers),
    )


class Attention(Module):
    """Grouped-query attention with norms of queries and keys. A gate multiplies its outputs."""

    def __init__(self, c: HybridConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        outputs = {"q_proj": 2 * queries, "k_proj": keys, "v_proj": keys}  # a query and its gate, for each head
        layers = {name: Linear(c.hidden_size, size, bias=False) for name, size in outputs.items()}
        self.qkv = MergedLinear(self, layers)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.norm_weight_offset)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.norm_weight_offset)
        self.o_proj = Linear(queries, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """As of `decoder.Attention`."""
        return self.qkv.layers

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        head_dim = self.heads.head_dim
        gated_query, key, value = (y.unflatten(-1, (-1, head_dim)) for y in self.qkv(x, batch))
        query, gate = gated_query.unflatten(1, (-1, 2)).unbind(2)  # [T, H, D] each
        query = self.q_norm(query.reshape(-1, head_dim)).view(query.shape)
        key = self.k_norm(key.reshape(-1, head_dim)).view(key.shape)  # [T, G, D]
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        attended = attend(query, cache, batch, head_dim**-0.5)
        return self.o_proj(attended * sigmoid(batch.attending(gate).flatten(1)), batch)


class JoinedDeltaNet(GatedDeltaNet):
    """The layer as Qwen3-Next's files store it: rows in the order of the key heads."""

    def register_projections(self, hidden_size: int, heads: DeltaHeads) -> None:
        widths = 2 * (heads.key_size + heads.value_size), 2 * heads.num_value_heads
        self.in_proj_qkvz = Linear(hidden_size, widths[0], bias=False)
        self.in_proj_ba = Linear(hidden_size, widths[1], bias=False, is_quantizable=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """As of `decoder.Attention`."""
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
            yield DecoderLayer(c, Attention(c), mlp)


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

"""AfMoE (Arcee Trinity): a norm of each residual branch, a gate of the attention's outputs, DeepSeek-V3's mixtures.

Only layers with a sliding window rotate queries and keys.
T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, N experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernels.quantize_rows import Activations
from kernels.sigmoid_gate import sigmoid_gate
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import BranchNormLayer, DecoderLM, WindowedConfig, read_decoder_config
from models.families.gemma2 import FULL, SLIDING, layer_windows
from models.families.olmo2 import IN_FLOAT32
from models.layers.attention import attend
from models.layers.grouped_moe import GroupedMoE, Routing, read_routing
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.moe import Router
from models.layers.named_parts import NamedParts
from models.layers.norm import ResidualStream, RMSNorm
from models.layout import HEADS, ModelLayout, Unit

ROUTING_KEYS = ("num_experts", "num_experts_per_tok", "n_group")


@dataclass(frozen=True)
class AfmoeConfig(WindowedConfig):
    norm_weight_offset: ClassVar[float | None] = IN_FLOAT32
    attention_bias: bool
    moe_intermediate_size: int
    num_shared_experts: int
    num_dense_layers: int
    mup_enabled: bool
    """Whether the embedding is multiplied by sqrt(E)."""
    routing: Routing

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return tuple(i >= self.num_dense_layers for i in range(self.num_hidden_layers))


def read_config(config: ConfigReader) -> AfmoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    for key, supported in (
        ("n_group", (1, None)),
        ("topk_group", (1, None)),
        ("route_norm", (True, None)),
        ("score_func", ("sigmoid", None)),
    ):
        config.expect(key, supported, None)
    for key in ("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm"):  # of training
        config.raw(key)
    shape = read_decoder_config(config, 1e-5, 16384)
    full_every = config.count("global_attn_every_n_layers", 4)
    types = [SLIDING if i % full_every else FULL for i in range(1, shape.num_hidden_layers + 1)]
    routing = read_routing(config, (1, 1), True, True, ROUTING_KEYS)
    return AfmoeConfig(
        **vars(shape),
        windows=layer_windows(config, types, 1024),
        attention_bias=config.get("attention_bias", bool, False),
        moe_intermediate_size=config.count("moe_intermediate_size"),
        num_shared_experts=config.count("num_shared_experts", 2),
        num_dense_layers=config.get("num_dense_layers", int, 1),
        mup_enabled=config.get("mup_enabled", bool, False),
        routing=replace(routing, scaling_factor=config.positive("route_scale", 1.0)),
    )


class Attention(decoder.Attention):
    def __init__(self, c: AfmoeConfig, window: int | None) -> None:
        super().__init__(c, window, c.attention_bias, c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, IN_FLOAT32)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, IN_FLOAT32)
        self.gate_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return *self.qkv.layers, self.gate_proj

    def forward(self, x: Activations, angles: Any, batch: Batch, cache: LayerCache) -> Tensor:
        projected = self.qkv(x, batch)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query = self.turn_and_store(self.q_norm(query), self.k_norm(key), value, angles, batch, cache)
        attended = attend(query, cache, batch, self.scale, window=self.window)
        return self.project(sigmoid_gate(attended, batch.attending(self.gate_proj(x, batch))), batch)


class FullAttention(Attention, decoder.NoPEAttention):
    """Attention without a window and without rotation."""


class TokenRouter(NamedParts):
    names = ("gate",)


class MoE(GroupedMoE):
    def register_router(self, hidden_size: int, routing: Routing) -> None:
        self._routing = routing
        self.router = TokenRouter(Router(hidden_size, routing.num_experts))
        self.expert_bias = nn.Parameter(torch.empty(routing.num_experts))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._routing.choose(self.router.parts[0].logits(x), self.expert_bias)


class AfmoeLayer(BranchNormLayer):
    names = ("input_layernorm", "self_attn", "pre_mlp_layernorm", "mlp")
    branch_norms = ("post_attention_layernorm", "post_mlp_layernorm")


def _layer(c: AfmoeConfig, window: int | None, sparse: bool) -> AfmoeLayer:
    attention = FullAttention(c, None) if window is None else Attention(c, window)
    if sparse:
        return AfmoeLayer(c, attention, MoE(c.hidden_size, c.moe_intermediate_size, c.num_shared_experts, c.routing))
    return AfmoeLayer(c, attention, MLP(c.hidden_size, c.intermediate_size))


class Afmoe(DecoderLM):
    config: AfmoeConfig
    layout = ModelLayout(
        norms=("input_layernorm", "pre_mlp_layernorm"),
        scale_fold_targets={"down_proj": "up_proj"},
        units={**HEADS, "gate_proj": (Unit.QUERY_HEAD,)},
    )
    float32_tensors = ("expert_bias", "router.gate.weight")

    def __init__(self, c: AfmoeConfig) -> None:
        # a planner's model has only the first layers
        kinds = zip(c.windows, c.layer_kinds, strict=False)
        super().__init__(c, (_layer(c, window, sparse) for window, sparse in kinds))

    def embed(self, batch: Batch) -> ResidualStream:
        stream = super().embed(batch)
        return ResidualStream(stream.x * self.config.hidden_size**0.5) if self.config.mup_enabled else stream

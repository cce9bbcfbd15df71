"""MiniMax-M2: a mixture of many small experts in every layer, and norms over all queries and all keys of a token.

T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, N experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.moe import route_corrected
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLM, read_decoder_config
from models.families.mixtral import Expert, MixtralLayer
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.moe import Experts, Router
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, read_rotary_config
from models.layout import ModelLayout

UNUSED = ("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp")
"""Keys in the hub's files for features that the model does not have."""
SUPPORTED = {
    "layernorm_full_attention_beta": (1, None),
    "layernorm_linear_attention_beta": (1, None),
    "layernorm_mlp_beta": (1, None),
    "qk_norm_type": ("per_layer", None),
    "scoring_func": ("sigmoid", None),
    "shared_intermediate_size": (0, None),
    "sliding_window": (None,),
    "use_qk_norm": (True, None),
    "use_routing_bias": (True, None),
}


@dataclass(frozen=True)
class MiniMaxM2Config(DecoderConfig):
    num_local_experts: int
    num_experts_per_tok: int


def read_config(config: ConfigReader) -> MiniMaxM2Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    for key, values in SUPPORTED.items():
        config.expect(key, values, None)
    for key in UNUSED:
        config.raw(key)
    kinds = config.raw("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise UserError(
            f"config.json: attn_type_list={kinds!r} is not supported: only 1, softmax attention, in every layer"
        )
    experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    head_dim, turning = config.count("head_dim"), config.raw("rotary_dim")
    turning = head_dim if turning is None else config.count("rotary_dim")
    read_rotary = partial(read_rotary_config, partial_rotary_factor=turning / head_dim, default_theta=5e6)
    return MiniMaxM2Config(
        **vars(read_decoder_config(config, read_rotary=read_rotary)),
        num_local_experts=experts,
        num_experts_per_tok=chosen,
    )


class Attention(decoder.Attention):
    """Attention whose norms need all heads.

    Each rank has the whole query and key projections, and attends with its own heads.
    """

    def __init__(self, c: MiniMaxM2Config) -> None:
        super().__init__(c)
        self.q_norm = RMSNorm(c.num_attention_heads * c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.num_key_value_heads * c.head_dim, c.rms_norm_eps)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        heads = self.heads
        query = self.q_norm(query.flatten(1)).unflatten(-1, (-1, self.head_dim))  # [T, H, D] of all ranks
        key = self.k_norm(key.flatten(1)).unflatten(-1, (-1, self.head_dim))  # [T, G, D] of all ranks
        query = query.narrow(1, heads.first, heads.num_attention_heads)
        return rope_and_store(query, heads.slice_keys(key, 1), value, *angles, *cache, batch.slots)


class MoE(Module):
    """K of N experts per token.

    The choice uses corrected sigmoid scores. The weights are the uncorrected scores of the chosen experts, divided by
    their sum.
    """

    readers: Sequence[Linear] = ()
    """As of `SparseMoeBlock`."""

    def __init__(self, c: MiniMaxM2Config) -> None:
        super().__init__()
        self.gate = Router(c.hidden_size, c.num_local_experts)
        self.e_score_correction_bias = nn.Parameter(torch.empty(c.num_local_experts))
        self.experts = Experts(
            (Expert(c.hidden_size, c.intermediate_size) for _ in range(c.num_local_experts)), c.num_experts_per_tok
        )

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        weights, chosen = route_corrected(
            self.gate.logits(x), self.e_score_correction_bias, self.experts.num_experts_per_tok, True
        )
        routed: Tensor = self.experts(x, weights, chosen)
        return routed


class MiniMaxM2(DecoderLM):
    layout = ModelLayout(
        scale_fold_targets={"w2": "w3", "o_proj": "v_proj"},
        row_parallel=("o_proj", "w2"),
        replicated=("q_proj", "k_proj"),
    )
    float32_tensors = ("e_score_correction_bias", "block_sparse_moe.gate.weight")

    def __init__(self, c: MiniMaxM2Config) -> None:
        super().__init__(c, (MixtralLayer(c, Attention(c), MoE(c)) for _ in range(c.num_hidden_layers)))

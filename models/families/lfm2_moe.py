"""LFM2-8B-A1B (arXiv 2511.23404): LFM2 with mixtures of experts in all but the first layers.

T tokens, E hidden channels, N experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.moe import route_corrected
from models.batch import Batch
from models.config import ConfigReader
from models.decoder import DecoderLM
from models.families.lfm2 import FeedForward, Lfm2, Lfm2Config, make_layer, read_shape
from models.layers.constant import Constant
from models.layers.linear import Linear
from models.layers.module import Module
from models.layers.moe import Experts, Router


@dataclass(frozen=True)
class Lfm2MoeConfig(Lfm2Config):
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_dense_layers: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return tuple(i >= self.num_dense_layers for i in range(self.num_hidden_layers))


def read_config(config: ConfigReader) -> Lfm2MoeConfig:
    """Read config.json, with defaults as in transformers. Raises UserError as `lfm2.read_config` does."""
    experts, chosen = config.count("num_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_experts={experts}")
    return Lfm2MoeConfig(
        **vars(read_shape(config, config.count("intermediate_size"))),
        moe_intermediate_size=config.count("moe_intermediate_size"),
        num_experts=experts,
        num_experts_per_tok=chosen,
        num_dense_layers=config.get("num_dense_layers", int, 2),
        use_expert_bias=config.get("use_expert_bias", bool, True),
        norm_topk_prob=config.get("norm_topk_prob", bool, True),
        routed_scaling_factor=config.positive("routed_scaling_factor", 1.0),
    )


class MoE(Module):
    """K of N experts per token, chosen by sigmoid scores plus a bias and weighted by the scores alone."""

    readers: Sequence[Linear] = ()
    """As of `SparseMoeBlock`."""

    def __init__(self, c: Lfm2MoeConfig) -> None:
        super().__init__()
        self.gate = Router(c.hidden_size, c.num_experts)
        self.expert_bias = nn.Parameter(torch.empty(c.num_experts)) if c.use_expert_bias else None
        self.experts = Experts(
            (FeedForward(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts)), c.num_experts_per_tok
        )
        self.norm_topk_prob, self.routed_scaling_factor = c.norm_topk_prob, c.routed_scaling_factor
        self.no_bias = Constant(torch.zeros(c.num_experts, device="cpu"))

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        bias = self.no_bias.on(x.device) if self.expert_bias is None else self.expert_bias
        num_chosen = self.experts.num_experts_per_tok
        weights, chosen = route_corrected(self.gate.logits(x), bias, num_chosen, self.norm_topk_prob)
        routed: Tensor = self.experts(x, weights * self.routed_scaling_factor, chosen)
        return routed


class Lfm2Moe(DecoderLM):
    layout = replace(Lfm2.layout, replicated=("gate",))
    float32_tensors = ("expert_bias", "feed_forward.gate.weight")

    def __init__(self, c: Lfm2MoeConfig) -> None:
        super().__init__(
            c,
            (
                make_layer(c, is_recurrent, MoE(c) if sparse else FeedForward(c.hidden_size, c.intermediate_size))
                for is_recurrent, sparse in zip(c.recurrent_layers, c.layer_kinds, strict=True)
            ),
        )

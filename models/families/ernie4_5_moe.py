"""Ernie 4.5 with mixtures of experts (21B A3B, 300B A47B).

T tokens, E hidden channels, N experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.moe import route_corrected
from models.batch import Batch
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, InterleavedRopeAttention
from models.families.ernie4_5 import read_ernie_config
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts, Router


@dataclass(frozen=True)
class Ernie45MoeConfig(DecoderConfig):
    moe_num_experts: int
    moe_k: int
    moe_intermediate_size: int
    moe_num_shared_experts: int
    moe_norm_min: float
    sparse_layers: tuple[bool, ...]

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.sparse_layers


def read_config(config: ConfigReader) -> Ernie45MoeConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    shape = read_ernie_config(config)
    config.expect("use_bias", (False, None), False)  # no published mixture has biases
    config.expect("moe_use_aux_free", (True, None), None)  # the correction of the routing scores
    for key in ("moe_capacity", "moe_gate", "num_nextn_predict_layers"):  # training settings, and unused tensors
        config.raw(key)
    experts, chosen = config.count("moe_num_experts", 64), config.count("moe_k", 6)
    if chosen > experts:
        raise UserError(f"config.json: moe_k={chosen} is more than moe_num_experts={experts}")
    shared = 0 if config.raw("moe_num_shared_experts") == 0 else config.count("moe_num_shared_experts", 2)
    return Ernie45MoeConfig(
        **vars(shape),
        moe_num_experts=experts,
        moe_k=chosen,
        moe_intermediate_size=config.count("moe_intermediate_size"),
        moe_num_shared_experts=shared,
        moe_norm_min=config.positive("moe_norm_min", 1e-12),
        sparse_layers=_read_sparse_layers(config, shape.num_hidden_layers),
    )


def _read_sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer is a mixture.

    Mixtures are every `moe_layer_interval`th layer between the start and end index. The end index -1 is the model's
    last layer.
    """
    first, last = config.get("moe_layer_start_index", int, 1), config.get("moe_layer_end_index", int, -1)
    interval, last = config.count("moe_layer_interval", 1), num_layers - 1 if last == -1 else last
    return tuple((i + 1) % interval == 0 and first <= i <= last for i in range(num_layers))


class Statics(Module):
    """The correction of the experts' probabilities, used only for the choice."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.empty(1, num_experts))


class MoE(Module):
    """K of N experts per token, and shared experts for all tokens."""

    readers: Sequence[Linear] = ()
    """As of `SparseMoeBlock`."""

    def __init__(self, c: Ernie45MoeConfig) -> None:
        super().__init__()
        self.norm_min = c.moe_norm_min
        self.gate = Router(c.hidden_size, c.moe_num_experts)
        self.moe_statics = Statics(c.moe_num_experts)
        self.experts = Experts((MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.moe_num_experts)), c.moe_k)
        shared = c.moe_num_shared_experts
        self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * shared) if shared else None

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        logits, correction = self.gate.logits(x), self.moe_statics.e_score_correction_bias[0]  # [T, N], [N]
        weights, chosen = route_corrected(logits, correction, self.experts.num_experts_per_tok, False, True)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.norm_min)
        routed: Tensor = self.experts(x, weights, chosen)
        return routed if self.shared_experts is None else routed + self.shared_experts(x, batch)


class Ernie45Moe(DecoderLM):
    config: Ernie45MoeConfig
    float32_tensors = ("e_score_correction_bias", "mlp.gate.weight")

    def __init__(self, c: Ernie45MoeConfig) -> None:
        layers = (
            DecoderLayer(c, InterleavedRopeAttention(c), MoE(c) if sparse else MLP(c.hidden_size, c.intermediate_size))
            for sparse in c.layer_kinds
        )
        super().__init__(c, layers)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        return ("model.mtp_",)  # multi-token prediction layers

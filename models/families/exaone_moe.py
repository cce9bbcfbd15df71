"""K-EXAONE: EXAONE 4's attention in pre-norm layers, and DeepSeek-V3's mixtures of experts.

E hidden channels, N experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM
from models.families import exaone4
from models.families.exaone4 import Attention, Exaone4Config
from models.layers.grouped_moe import GroupedMoE, Routing, read_routing
from models.layers.mlp import MLP
from models.layers.moe import Router


@dataclass(frozen=True)
class ExaoneMoeConfig(Exaone4Config):
    moe_intermediate_size: int
    num_shared_experts: int
    sparse_layers: tuple[bool, ...]
    routing: Routing

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return self.sparse_layers[: self.num_hidden_layers]


def read_config(config: ConfigReader) -> ExaoneMoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    for key, supported in (("scoring_func", ("sigmoid", None)), ("topk_method", ("noaux_tc", None))):
        config.expect(key, supported, None)
    for key in ("is_moe_layer", "mtp_loss_scaling_factor", "num_nextn_predict_layers"):  # a copy, and unused layers
        config.raw(key)
    config.positive("routed_scaling_factor")  # transformers' default, 2.5, differs from DeepSeek's
    shape = exaone4.read_config(config)
    groups, keys = (config.count("n_group", 1), config.count("topk_group", 1)), ("num_experts", "num_experts_per_tok")
    return ExaoneMoeConfig(
        **vars(shape),
        moe_intermediate_size=config.count("moe_intermediate_size"),
        num_shared_experts=config.count("num_shared_experts", 1),
        sparse_layers=read_sparse_layers(config, shape.num_hidden_layers),
        routing=read_routing(config, groups, True, config.get("norm_topk_prob", bool, True), (*keys, "n_group")),
    )


def read_sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is a mixture.

    `mlp_layer_types` selects these layers. Without it, they follow the first `first_k_dense_replace` layers.
    """
    types, num_dense = config.raw("mlp_layer_types"), config.get("first_k_dense_replace", int, 1)
    if types is None:
        return tuple(i >= num_dense for i in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or {*map(str, types)} - {"dense", "sparse"}:
        raise UserError(f"config.json: mlp_layer_types={types!r} is not {num_layers} times 'dense' or 'sparse'")
    return tuple(kind == "sparse" for kind in types)


class MoE(GroupedMoE):
    """The correction of the scores is next to the router."""

    def register_router(self, hidden_size: int, routing: Routing) -> None:
        self._routing = routing
        self.gate = Router(hidden_size, routing.num_experts)
        self.e_score_correction_bias = nn.Parameter(torch.empty(routing.num_experts))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._routing.choose(self.gate.logits(x), self.e_score_correction_bias)


def _mlp(c: ExaoneMoeConfig, sparse: bool) -> nn.Module:
    if sparse:
        return MoE(c.hidden_size, c.moe_intermediate_size, c.num_shared_experts, c.routing)
    return MLP(c.hidden_size, c.intermediate_size)


class ExaoneMoe(DecoderLM):
    float32_tensors = ("e_score_correction_bias", "mlp.gate.weight")

    def __init__(self, c: ExaoneMoeConfig) -> None:
        # a planner's model has only the first layers
        kinds = zip(c.windows, c.layer_kinds, strict=False)
        super().__init__(c, (DecoderLayer(c, Attention(c, window), _mlp(c, sparse)) for window, sparse in kinds))

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        return ("mtp.",)  # the multi-token prediction layer

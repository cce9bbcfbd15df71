"""GLM-4.5, 4.5-Air and 4.6 (arXiv 2508.06471): grouped-query attention, and DeepSeek-V3's mixtures of experts."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from torch import nn

from models import decoder
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.families import qwen3
from models.families.deepseek_config import read_num_nextn
from models.layers.grouped_moe import GroupedMoE, Routing, read_routing
from models.layers.mlp import MLP
from models.layers.rotary import read_rotary_config


@dataclass(frozen=True)
class Glm4MoeConfig(DecoderConfig):
    attention_bias: bool
    use_qk_norm: bool
    moe_intermediate_size: int
    n_shared_experts: int
    first_k_dense_replace: int
    num_nextn_predict_layers: int
    routing: Routing

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        return tuple(i >= self.first_k_dense_replace for i in range(self.num_hidden_layers))


def read_config(config: ConfigReader) -> Glm4MoeConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    groups = config.count("n_group", 1), config.count("topk_group", 1)
    shape = read_decoder_config(config, read_rotary=partial(read_rotary_config, partial_rotary_factor=0.5))
    return Glm4MoeConfig(
        **vars(shape),
        attention_bias=config.get("attention_bias", bool, False),
        use_qk_norm=config.get("use_qk_norm", bool, False),
        moe_intermediate_size=config.count("moe_intermediate_size"),
        n_shared_experts=config.count("n_shared_experts", 1),
        first_k_dense_replace=config.get("first_k_dense_replace", int, 1),
        num_nextn_predict_layers=read_num_nextn(config, shape.num_hidden_layers),
        routing=read_routing(config, groups, True, config.get("norm_topk_prob", bool, True)),
    )


class Glm4Moe(DecoderLM):
    config: Glm4MoeConfig
    float32_tensors = ("e_score_correction_bias", "mlp.gate.weight")

    def __init__(self, c: Glm4MoeConfig, attentions: Iterable[nn.Module] | None = None) -> None:
        """`attentions`: of the layers, if they differ from GLM-4.5's."""
        attentions = attentions or (_attention(c) for _ in c.layer_kinds)
        layers = zip(attentions, c.layer_kinds, strict=True)
        super().__init__(c, (DecoderLayer(c, attention, _mlp(c, sparse)) for attention, sparse in layers))

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        first = self.config.num_hidden_layers  # the multi-token prediction layers follow the decoder layers
        return tuple(f"model.layers.{first + i}." for i in range(self.config.num_nextn_predict_layers))


def _attention(c: Glm4MoeConfig) -> nn.Module:
    if c.use_qk_norm:
        return qwen3.Attention(c, None, qkv_bias=c.attention_bias, o_bias=False)
    return decoder.Attention(c, qkv_bias=c.attention_bias)


def _mlp(c: Glm4MoeConfig, sparse: bool) -> nn.Module:
    if sparse:
        return GroupedMoE(c.hidden_size, c.moe_intermediate_size, c.n_shared_experts, c.routing)
    return MLP(c.hidden_size, c.intermediate_size)

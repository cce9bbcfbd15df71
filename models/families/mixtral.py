"""Mixtral 8x7B and 8x22B: Mistral with mixtures of experts as feed-forward layers (arXiv 2401.04088)."""

from dataclasses import dataclass, replace

from conf.errors import UserError
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.mlp import MLP
from models.layers.moe import MixtureConfig, SparseMoeBlock
from models.layers.sliding_window import read_window
from models.layout import ModelLayout


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig):
    sliding_window: int | None
    mixture: MixtureConfig

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=self.sliding_window is not None)


def read_config(config: ConfigReader) -> MixtralConfig:
    experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    shape = read_decoder_config(config, theta=1e6)
    return MixtralConfig(
        **vars(shape),
        sliding_window=read_window(config),
        mixture=MixtureConfig(
            num_experts=experts,
            num_experts_per_tok=chosen,
            moe_intermediate_size=shape.intermediate_size,
            norm_topk_prob=True,
            sparse_layers=(True,) * shape.num_hidden_layers,
        ),
    )


class Expert(MLP):
    names = ("w1", "w3", "w2")


class MixtralLayer(DecoderLayer):
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "block_sparse_moe")


class Mixtral(DecoderLM):
    layout = ModelLayout(
        scale_fold_targets={"w2": "w3", "o_proj": "v_proj"}, row_parallel=("o_proj", "w2"), replicated=("gate",)
    )

    def __init__(self, c: MixtralConfig) -> None:
        super().__init__(
            c,
            (
                MixtralLayer(c, Attention(c, c.sliding_window), SparseMoeBlock(c.hidden_size, c.mixture, Expert))
                for _ in range(c.num_hidden_layers)
            ),
        )

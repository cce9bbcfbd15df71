"""Phi-3.5-MoE (arXiv 2404.14219): Mixtral with LayerNorms, biases, and weights of experts by SparseMixer.

T tokens, E hidden channels, N experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from models.batch import Batch
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import Attention, AttentionConfig, read_decoder_config
from models.families.mixtral import Expert
from models.families.phi3 import LongRope, LongRopeConfig, read_factors
from models.layer_norm_decoder import LayerNormLM, SequentialLayer
from models.layers.moe import MixtureConfig, SparseMoeBlock
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryConfig
from models.layers.sliding_window import read_window
from models.layout import ModelLayout

NUM_CHOSEN = 2  # SparseMixer chooses twice


@dataclass(frozen=True)
class PhimoeConfig(AttentionConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    max_position_embeddings: int
    rotary: LongRopeConfig
    attention_bias: bool
    lm_head_bias: bool
    sliding_window: int | None
    router_jitter_noise: float
    mixture: MixtureConfig

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(long_rope_threshold=self.rotary.threshold, has_windows=self.sliding_window is not None)


def read_config(config: ConfigReader) -> PhimoeConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    config.raw("input_jitter_noise")  # of training
    config.expect("num_experts_per_tok", (NUM_CHOSEN,), NUM_CHOSEN)
    experts = config.count("num_local_experts", 16)
    if experts < NUM_CHOSEN:
        raise UserError(f"config.json: num_local_experts={experts} is less than num_experts_per_tok={NUM_CHOSEN}")
    shape = vars(read_decoder_config(config, 1e-5, 131072, _no_rotary))
    length = config.count("max_position_embeddings", 131072)
    return PhimoeConfig(
        **shape | {"rotary": _read_rotary(config, shape["head_dim"], length)},
        max_position_embeddings=length,
        attention_bias=config.get("attention_bias", bool, False),
        lm_head_bias=config.get("lm_head_bias", bool, False),
        sliding_window=read_window(config),
        router_jitter_noise=config.positive("router_jitter_noise", 0.01),
        mixture=MixtureConfig(
            num_experts=experts,
            num_experts_per_tok=NUM_CHOSEN,
            moe_intermediate_size=shape["intermediate_size"],
            norm_topk_prob=False,
            sparse_layers=(True,) * shape["num_hidden_layers"],
        ),
    )


def _no_rotary(config: ConfigReader, head_dim: int, length: int) -> RotaryConfig:
    return RotaryConfig(head_dim, length)


def _read_rotary(config: ConfigReader, head_dim: int, length: int) -> LongRopeConfig:
    theta, outer = config.positive("rope_theta", 1e6), config.raw("original_max_position_embeddings")
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({}, "config.json")
    theta = scaling.positive("rope_theta", theta)
    is_old = scaling.raw("type") is not None and scaling.raw("rope_type") is None
    kind = scaling.expect("type" if is_old else "rope_type", ("default", "longrope"), "default")
    if kind == "default":
        ones = (1.0,) * (head_dim // 2)
        rotary = LongRopeConfig(theta, length, ones, ones, 1.0, 1.0)
    else:
        original = scaling.count("original_max_position_embeddings", outer)
        short, long = (read_factors(scaling, key, head_dim // 2) for key in ("short_factor", "long_factor"))
        scales = scaling.positive("short_mscale"), scaling.positive("long_mscale")
        rotary = LongRopeConfig(theta, original, short, long, *scales)
    if unknown := scaling.unread():
        raise UserError(f"config.json: rope_scaling has fields that are not supported: {', '.join(unknown)}")
    return rotary


class SparseMixer(SparseMoeBlock):
    """A mixture whose experts have weights of separate softmaxes, with a sum between 0 and 2 (arXiv 2409.12136)."""

    def __init__(self, c: PhimoeConfig) -> None:
        super().__init__(c.hidden_size, c.mixture, Expert)
        self._tolerance = 2 * c.router_jitter_noise

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        weights, chosen = sparse_mixer(self.gate(x, batch).float(), self._tolerance)
        result: Tensor = self.experts(x, weights, chosen)
        return result


def sparse_mixer(scores: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return float32 weights and int64 indices of the two best experts, both [T, 2], by the scores float32 [T, N].

    The softmax of each choice leaves out the experts whose scores are far below the best score, relative to the larger
    of both. The softmax of the second choice also leaves out the first expert.
    """
    best, chosen = scores.topk(NUM_CHOSEN, dim=-1)  # [T, 2] each
    without_first = scores.scatter(1, chosen[:, :1], -math.inf)
    gaps = best[:, :, None] - torch.cat((scores[:, None], without_first[:, None]), 1)  # [T, 2, N]
    sizes = torch.maximum(torch.maximum(scores, -scores)[:, None], best[:, :, None])
    shares = (-gaps).exp().masked_fill(gaps / sizes > tolerance, 0.0)
    return 1 / shares.sum(-1), chosen


class DecoderLayer(SequentialLayer):
    names = ("input_layernorm", "self_attn", "post_attention_layernorm", "block_sparse_moe")


class Phimoe(LayerNormLM):
    layout = ModelLayout(
        scale_fold_targets={"w2": "w3", "o_proj": "v_proj"}, row_parallel=("o_proj", "w2"), replicated=("gate",)
    )

    def __init__(self, c: PhimoeConfig) -> None:
        layers = (
            DecoderLayer(
                (_norm(c), _norm(c)),
                Attention(c, c.sliding_window, c.attention_bias, c.attention_bias),
                SparseMixer(c),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, _norm(c), head_bias=c.lm_head_bias)
        self.rotary = LongRope(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)


def _norm(c: PhimoeConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps)

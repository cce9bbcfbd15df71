"""gpt-oss: mixtures of experts in every layer, and attention with sinks, in every second layer over a window
(arXiv 2508.10925).

T tokens, H query heads, D channels per head, E hidden channels, F channels of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.moe import route
from kernels.quantize_rows import Activations
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM, WindowedConfig, read_decoder_config
from models.families.gemma2 import FULL, SLIDING, layer_windows
from models.families.olmo2 import IN_FLOAT32
from models.layers.attention import attend
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.moe import Experts
from models.layers.rotary import Angles
from models.layout import JoinedExperts, ModelLayout


@dataclass(frozen=True)
class GptOssConfig(WindowedConfig):
    norm_weight_offset: ClassVar = IN_FLOAT32
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_alpha: float
    swiglu_limit: float
    attention_bias: bool


def read_config(config: ConfigReader) -> GptOssConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok={chosen} is more than num_local_experts={experts}")
    if config.raw("rope_parameters") is None and config.raw("rope_scaling") is None:
        raise UserError(
            "config.json: rope_parameters is missing: give rope_type, factor and the other settings of yarn"
        )
    for key in ("experts_per_token", "initial_context_length"):  # copies in OpenAI's files
        config.raw(key)
    types = [FULL if i % 2 else SLIDING for i in range(config.num_layers())]
    return GptOssConfig(
        **vars(read_decoder_config(config, 1e-5, 131072, theta=150000.0)),
        windows=layer_windows(config, types, 128),
        num_local_experts=experts,
        num_experts_per_tok=chosen,
        swiglu_alpha=config.positive("swiglu_alpha", 1.702),
        swiglu_limit=config.positive("swiglu_limit", 7.0),
        attention_bias=config.get("attention_bias", bool, True),
    )


class Attention(decoder.Attention):
    """Attention whose softmax has one more score per head, a sink, without a value (arXiv 2309.17453)."""

    def __init__(self, c: GptOssConfig, window: int | None) -> None:
        super().__init__(c, window, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.sinks = nn.Parameter(torch.empty(c.num_attention_heads))

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        projected = self.qkv(x, batch)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query = self.turn_and_store(query, key, value, angles, batch, cache)
        sinks = self.heads.slice_queries(self.sinks)
        return self.project(attend(query, cache, batch, self.scale, window=self.window, sinks=sinks), batch)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + 1), [T, F], with gate at most `limit` and up within +-`limit`.

    The float32 result is rounded once. torch's exp is used as in kernels/swiglu/reference.py.
    """
    bounded = gate.float().clamp(max=limit)
    active = bounded / (1 + (-alpha * bounded).exp())
    return (active * (up.float().clamp(-limit, limit) + 1)).to(gate.dtype)


class Expert(MLP):
    def __init__(self, c: GptOssConfig) -> None:
        super().__init__(c.hidden_size, c.intermediate_size, bias=True)
        self.activation = partial(clamped_swiglu, alpha=c.swiglu_alpha, limit=c.swiglu_limit)


class MoE(Module):
    """A router and its experts. The weights of a token's experts are the softmax of their own logits."""

    readers: Sequence[Linear] = ()
    """As of `SparseMoeBlock`."""

    def __init__(self, c: GptOssConfig) -> None:
        super().__init__()
        self.router = Linear(c.hidden_size, c.num_local_experts, is_quantizable=False)
        self.experts = Experts((Expert(c) for _ in range(c.num_local_experts)), c.num_experts_per_tok)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """x and the result are [T, E]."""
        weights, chosen = route(self.router(x, batch), self.experts.num_experts_per_tok, True)
        result: Tensor = self.experts(x, weights, chosen)
        return result


class GptOss(DecoderLM):
    # (up + 1) and the clamps do not commute with factors of up_proj's outputs
    layout = ModelLayout(
        scale_fold_targets={"o_proj": "v_proj"},
        replicated=("router",),
        joined_experts=JoinedExperts(inputs_first=True, alternates=True),
    )
    float32_tensors = ("self_attn.sinks",)

    def __init__(self, c: GptOssConfig) -> None:
        super().__init__(c, (DecoderLayer(c, Attention(c, window), MoE(c)) for window in c.windows))

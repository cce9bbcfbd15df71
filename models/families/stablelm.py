"""StableLM 3B, StableLM 2 (arXiv 2402.17834): Llama with LayerNorms with bias. A quarter of a head's channels rotates.

T tokens, H heads, D channels per head.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kernels.layer_norm import layer_norm
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, read_decoder_config
from models.layer_norm_decoder import ParallelLayer, RotaryLayerNormLM, SequentialLayer
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, read_rotary_config


@dataclass(frozen=True)
class StableLmConfig(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    use_qkv_bias: bool
    qk_layernorm: bool
    use_parallel_residual: bool
    """Whether attention and feed-forward read one norm, and their outputs are added."""


def read_config(config: ConfigReader) -> StableLmConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    eps, read_rotary = config.positive("layer_norm_eps", 1e-5), partial(read_rotary_config, partial_rotary_factor=0.25)
    shape = read_decoder_config(config, eps, 4096, read_rotary)
    config.expect("head_dim", (None, shape.hidden_size // shape.num_attention_heads), None)
    return StableLmConfig(
        **vars(shape) | {"rms_norm_eps": eps},
        use_qkv_bias=config.get("use_qkv_bias", bool, False),
        qk_layernorm=config.get("qk_layernorm", bool, False),
        use_parallel_residual=config.get("use_parallel_residual", bool, False),
    )


class HeadNorms(Module):
    """LayerNorm without bias of each head. Each head has a norm of its own."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(LayerNorm(head_dim, eps, bias=False) for _ in range(num_heads))
        self.eps = eps

    def forward(self, x: Tensor, first: int) -> Tensor:
        """x [T, H, D]: the heads from `first` on."""
        weights: list[Tensor] = [norm.weight for norm in self.norms[first : first + x.shape[1]]]  # type: ignore[misc]
        return layer_norm(x.flatten(0, 1), None, None, self.eps).view(x.shape) * torch.stack(weights)


class NormedAttention(Attention):
    """Attention with a norm of each query and key before the rotation. Each rank holds the norms of all heads."""

    def __init__(self, c: StableLmConfig) -> None:
        super().__init__(c, qkv_bias=c.use_qkv_bias)
        self.q_layernorm = HeadNorms(c.num_attention_heads, c.head_dim, c.rms_norm_eps)
        self.k_layernorm = HeadNorms(c.num_key_value_heads, c.head_dim, c.rms_norm_eps)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        query = self.q_layernorm(query, self.heads.first)
        key = self.k_layernorm(key, self.heads.first_key)
        return super().turn_and_store(query, key, value, angles, batch, cache)


class StableLm(RotaryLayerNormLM):
    def __init__(self, c: StableLmConfig) -> None:
        super().__init__(c, (_make_layer(c) for _ in range(c.num_hidden_layers)), _norm(c))


def _norm(c: StableLmConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps)


def _make_layer(c: StableLmConfig) -> nn.Module:
    attention = NormedAttention(c) if c.qk_layernorm else Attention(c, qkv_bias=c.use_qkv_bias)
    mlp = MLP(c.hidden_size, c.intermediate_size)
    if c.use_parallel_residual:
        return ParallelLayer(_norm(c), attention, mlp)
    return SequentialLayer((_norm(c), _norm(c)), attention, mlp)

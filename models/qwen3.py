"""Qwen 3: Llama's decoder with a norm on every head's query and key (arXiv 2505.09388).

T tokens, H query heads, G key/value heads, D channels per head.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from kernels.kv_store import rope_and_store
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import MLP, DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.attention import attend
from models.layers.linear import Linear, linear_together
from models.layers.norm import RMSNorm
from models.layers.sliding_window import read_windows


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    attention_bias: bool
    windows: tuple[int | None, ...]


def read_config(config: ConfigReader) -> Qwen3Config:
    config.count("head_dim")  # transformers would take 128 where it is missing
    shape = read_decoder_config(config)
    return Qwen3Config(
        **vars(shape),
        attention_bias=config.get("attention_bias", bool, False),
        windows=read_windows(config, shape.num_hidden_layers),
    )


class Attention(nn.Module):
    def __init__(self, c: DecoderConfig, window: int | None, bias: bool) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.window = window
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        projected = linear_together(x, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query_norm, key_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        query = rope_and_store(query, key, value, cos, sin, *cache, batch.slots, False, query_norm, key_norm, eps)
        attended = attend(query, cache, batch, self.head_dim**-0.5, window=self.window)
        return self.o_proj(attended)  # type: ignore[no-any-return]


class Qwen3(DecoderLM):
    def __init__(self, c: Qwen3Config) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(c, Attention(c, window, c.attention_bias), MLP(c.hidden_size, c.intermediate_size))
                for window in c.windows
            ),
        )

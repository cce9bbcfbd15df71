"""Qwen 3: Llama's decoder with a norm on each head's query and key (arXiv 2505.09388)."""

from dataclasses import dataclass

from torch import Tensor

from kernels.kv_store import rope_and_store
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, WindowedConfig, read_decoder_config
from models.layers.mlp import MLP
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles
from models.layers.sliding_window import read_windows


@dataclass(frozen=True)
class Qwen3Config(WindowedConfig):
    attention_bias: bool


def read_config(config: ConfigReader) -> Qwen3Config:
    config.count("head_dim")  # transformers defaults to 128
    shape = read_decoder_config(config)
    return Qwen3Config(
        **vars(shape),
        attention_bias=config.get("attention_bias", bool, False),
        windows=read_windows(config, shape.num_hidden_layers),
    )


class Attention(decoder.Attention):
    def __init__(self, c: DecoderConfig, window: int | None, qkv_bias: bool, o_bias: bool) -> None:
        super().__init__(c, window, qkv_bias, o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        query_norm, key_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return rope_and_store(query, key, value, *angles, *cache, batch.slots, False, query_norm, key_norm, eps)


class Qwen3(DecoderLM):
    def __init__(self, c: Qwen3Config) -> None:
        super().__init__(
            c,
            (
                DecoderLayer(
                    c, Attention(c, window, c.attention_bias, c.attention_bias), MLP(c.hidden_size, c.intermediate_size)
                )
                for window in c.windows
            ),
        )

"""EXAONE 4 (arXiv 2507.11407): norms after attention and feed-forward, and on each head's query and key.

If some layers have a sliding window, full-attention layers do not rotate queries and keys.
T tokens, H query heads, G key/value heads, D channels per head.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.kv_store import kv_store
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import WindowedConfig, read_decoder_config
from models.families import qwen3
from models.families.gemma2 import read_patterned_windows
from models.families.olmo2 import PostNormLM
from models.layers.rotary import Angles


@dataclass(frozen=True)
class Exaone4Config(WindowedConfig):
    is_hybrid: bool
    """Whether `sliding_window` is a number, even if no layer uses it."""


def read_config(config: ConfigReader) -> Exaone4Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    shape = read_decoder_config(config, rms_norm_eps=1e-5, max_position_embeddings=2048)
    is_hybrid = config.raw("sliding_window", 4096) is not None
    if is_hybrid:
        windows = read_patterned_windows(config, full_every=4)
    else:
        config.expect("layer_types", (None, ["full_attention"] * shape.num_hidden_layers), None)
        config.raw("sliding_window_pattern")  # no effect without a window
        windows = (None,) * shape.num_hidden_layers
    return Exaone4Config(**vars(shape), windows=windows, is_hybrid=is_hybrid)


class Attention(qwen3.Attention):
    def __init__(self, c: Exaone4Config, window: int | None) -> None:
        super().__init__(c, window, qkv_bias=False, o_bias=False)
        self.turns = window is not None or not c.is_hybrid

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        if self.turns:
            return super().turn_and_store(query, key, value, angles, batch, cache)
        query, key = self.q_norm(query), self.k_norm(key)  # [T, H, D], [T, G, D]
        kv_store(key, value, *cache, batch.slots)
        return query


class Exaone4(PostNormLM):
    def __init__(self, c: Exaone4Config) -> None:
        super().__init__(c, (Attention(c, window) for window in c.windows))

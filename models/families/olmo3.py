"""OLMo 3, from config.json: OLMo 2, of whose layers three of four see a window, and a scaled rotation in the others alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.families import olmo2
from models.families.gemma2 import read_windows
from models.families.olmo2 import IN_FLOAT32, Olmo2, Olmo2Config, PostNormLM
from models.layers.rotary import AnglesByLayer, RotaryConfig, RotaryEmbedding, read_rotary_by_layer


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    windows: tuple[int | None, ...]
    sliding_rotary: RotaryConfig
    """That of layers with a window; `rotary` is that of the others."""

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)


def read_config(config: ConfigReader) -> Olmo3Config:
    """Raises UserError for a missing key, a wrong type, or a value that this file does not implement. Defaults are transformers'."""
    config.expect("hidden_act", ("silu",), "silu")
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    config.check_multiple("hidden_size", hidden_size, "2 * num_attention_heads", 2 * heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    head_dim = hidden_size // heads
    config.expect("head_dim", (None, head_dim), None)
    theta = config.positive("rope_theta", 5e5)
    rotary, sliding_rotary = read_rotary_by_layer(
        config, head_dim, config.count("max_position_embeddings", 2048), theta=theta, sliding_theta=theta
    )
    return Olmo3Config(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-5),
        attention_bias=config.get("attention_bias", bool, False),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        windows=read_windows(config, full_every=4),
        rotary=rotary,
        sliding_rotary=sliding_rotary,
    )


class Attention(olmo2.Attention):
    def forward(self, x: Tensor, angles: AnglesByLayer, batch: Batch, cache: LayerCache) -> Tensor:  # type: ignore[override]
        return super().forward(x, angles.of(self.window), batch, cache)


class Olmo3(PostNormLM):
    layout = Olmo2.layout

    def __init__(self, c: Olmo3Config) -> None:
        super().__init__(c, (Attention(c, window) for window in c.windows), IN_FLOAT32)
        self.sliding_rotary = RotaryEmbedding(c.sliding_rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[AnglesByLayer]:
        full, sliding = (
            rotary.angles(batch.positions, batch.prompt_lengths, dtype) for rotary in (self.rotary, self.sliding_rotary)
        )
        return (AnglesByLayer(full, sliding),)

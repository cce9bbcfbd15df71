"""OLMo 3: OLMo 2 with a sliding window in three of four layers. Only full-attention layers use a scaled rotation."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import WindowedConfig, read_decoder_config
from models.families import olmo2
from models.families.gemma2 import read_windows
from models.families.olmo2 import IN_FLOAT32, Olmo2, Olmo2Config, PostNormLM
from models.layers.rotary import AnglesByLayer, RotaryByLayer, RotaryConfig, read_rotary_by_layer


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config, WindowedConfig):
    sliding_rotary: RotaryConfig
    """The rotary settings of sliding-window layers. `rotary` applies to full-attention layers."""


def read_config(config: ConfigReader) -> Olmo3Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    theta = config.positive("rope_theta", 5e5)
    read_both = partial(read_rotary_by_layer, theta=theta, sliding_theta=theta)
    shape = read_decoder_config(config, 1e-5, 2048, read_rotary=lambda *sizes: read_both(*sizes)[0])
    _, sliding_rotary = read_both(config, shape.head_dim, shape.rotary.max_position_embeddings)
    return Olmo3Config(
        **vars(shape),
        attention_bias=config.get("attention_bias", bool, False),
        windows=read_windows(config, full_every=4),
        sliding_rotary=sliding_rotary,
    )


class Attention(olmo2.Attention):
    def forward(self, x: Activations, angles: AnglesByLayer, batch: Batch, cache: LayerCache) -> Tensor:  # type: ignore[override]
        return super().forward(x, angles.of(self.window), batch, cache)


class Olmo3(PostNormLM):
    layout = Olmo2.layout

    def __init__(self, c: Olmo3Config) -> None:
        rotary = RotaryByLayer(c.rotary, c.sliding_rotary)
        super().__init__(c, (Attention(c, window) for window in c.windows), IN_FLOAT32, rotary)

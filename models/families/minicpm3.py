"""MiniCPM3 4B (arXiv 2404.06395): DeepSeek-V2's attention in dense layers, with Granite's factors and long RoPE."""

import math
from dataclasses import dataclass

from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.families.deepseek import Attention, Deepseek
from models.families.deepseek_config import LatentConfig, read_latent_shape
from models.families.granite import DecoderLayer, GraniteLM, Multipliers
from models.families.phi3 import LongRope, LongRopeConfig, read_long_rope
from models.layers.mlp import MLP
from models.layers.rotary import RotaryConfig, RotaryEmbedding, read_rotary_config


@dataclass(frozen=True)
class MiniCPM3Config(LatentConfig):
    rotary: RotaryConfig | LongRopeConfig
    max_position_embeddings: int
    multipliers: Multipliers

    @property
    def context_length(self) -> int:
        return self.rotary.context_length if isinstance(self.rotary, RotaryConfig) else self.max_position_embeddings

    @property
    def capabilities(self) -> ModelCapabilities:
        if isinstance(self.rotary, RotaryConfig):
            return ModelCapabilities(keys_depend_on_length=self.rotary.type == "dynamic")
        return ModelCapabilities(long_rope_threshold=self.rotary.threshold)


def read_config(config: ConfigReader) -> MiniCPM3Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    shape = read_latent_shape(config, 1e-5, hidden_size // heads, tie_word_embeddings=True)
    num_layers, rope_dim = shape["num_hidden_layers"], shape["qk_rope_head_dim"]
    length = config.count("max_position_embeddings", 32768)
    depth = math.sqrt(num_layers) if config.raw("scale_depth", 1.4) is None else config.positive("scale_depth", 1.4)
    base = hidden_size if config.raw("dim_model_base", 256) is None else config.positive("dim_model_base", 256.0)
    return MiniCPM3Config(
        **shape,
        rotary=_read_rotary(config, rope_dim, length),
        max_position_embeddings=length,
        multipliers=Multipliers(
            embedding=config.positive("scale_emb", 12.0),
            attention=(shape["qk_nope_head_dim"] + rope_dim) ** -0.5,
            residual=depth / math.sqrt(num_layers),
            logits_divisor=hidden_size / base,
        ),
    )


def _read_rotary(config: ConfigReader, head_dim: int, max_position_embeddings: int) -> RotaryConfig | LongRopeConfig:
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    if scaling is None or "longrope" not in (scaling.raw("type"), scaling.raw("rope_type")):
        return read_rotary_config(config, head_dim, max_position_embeddings)
    original = scaling.count("original_max_position_embeddings", max_position_embeddings)
    return read_long_rope(config, head_dim, max_position_embeddings, original)


class MiniCPM3(GraniteLM):
    layout = Deepseek.layout

    def __init__(self, c: MiniCPM3Config) -> None:
        rotary = RotaryEmbedding(c.rotary) if isinstance(c.rotary, RotaryConfig) else LongRope(c.rotary)
        layers = (
            DecoderLayer(c, Attention(c, rope_interleave=False), MLP(c.hidden_size, c.intermediate_size))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, c.multipliers, layers, rotary)

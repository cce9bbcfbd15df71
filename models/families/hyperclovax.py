"""HyperCLOVA X SEED Think 14B: Granite with a norm of each residual branch, and a factor of the logits."""

from dataclasses import dataclass

from torch import nn

from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.families import granite, llama
from models.families.granite import Attention, GraniteConfig, GraniteLM, Multipliers
from models.layers.mlp import MLP
from models.layers.norm import ResidualStream, RMSNorm
from models.layers.rotary import Angles, RotaryEmbedding


@dataclass(frozen=True)
class HyperCLOVAXConfig(GraniteConfig):
    use_post_norm: bool


def read_config(config: ConfigReader) -> HyperCLOVAXConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    shape = llama.read_config(config)
    return HyperCLOVAXConfig(
        **vars(shape),
        multipliers=Multipliers(
            embedding=config.positive("embedding_multiplier", 1.0),
            attention=config.positive("attention_multiplier", shape.head_dim**-0.5),
            residual=config.positive("residual_multiplier", 1.0),
            logits_divisor=1 / config.positive("logits_scaling", 1.0),
        ),
        use_post_norm=config.get("use_post_norm", bool, True),
    )


class DecoderLayer(granite.DecoderLayer):
    """Pre-norm. The outputs of attention and feed-forward are normed and scaled before they are added."""

    def __init__(self, c: HyperCLOVAXConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, self_attn, mlp)
        self.post_norm1 = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_norm2 = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: LayerCache) -> ResidualStream:
        attention_norm, attention, mlp_norm, mlp = self.parts
        normed, x = attention_norm(*stream, attention.readers)  # [T, E] each
        attended = self.post_norm1(attention(normed, angles, batch, cache)) * self.residual_multiplier
        normed, x = mlp_norm(batch.attending(x), attended, mlp.readers)
        return ResidualStream(x, self.post_norm2(mlp(normed, batch)) * self.residual_multiplier)


class HyperCLOVAX(GraniteLM):
    def __init__(self, c: HyperCLOVAXConfig) -> None:
        layer = DecoderLayer if c.use_post_norm else granite.DecoderLayer
        layers = (
            layer(
                c,
                Attention(c, c.multipliers.attention, c.attention_bias),
                MLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, c.multipliers, layers, RotaryEmbedding(c.rotary))

"""Granite 3 (dense): Llama with a factor on each of embedding, attention, residual branches and logits."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from kernels.quantize_rows import Activations
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, PreNormLM, PreNormShape, Rotary
from models.families import llama
from models.families.llama import LlamaConfig
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.norm import ResidualStream
from models.layers.rotary import Angles, RotaryEmbedding


@dataclass(frozen=True)
class Multipliers:
    embedding: float
    attention: float
    """Of the attention logits, instead of 1 / sqrt(D)."""
    residual: float
    logits_divisor: float


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    multipliers: Multipliers


def read_config(config: ConfigReader) -> GraniteConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    return GraniteConfig(**vars(llama.read_config(config)), multipliers=read_multipliers(config))


def read_multipliers(config: ConfigReader) -> Multipliers:
    """Read the four factors. Raises UserError for mistyped values, and for values that are not positive."""
    keys = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    return Multipliers(*(config.positive(key, 1.0) for key in keys))


class Attention(decoder.Attention):
    def __init__(self, c: DecoderConfig, scale: float, bias: bool) -> None:
        super().__init__(c, qkv_bias=bias, o_bias=bias)
        self.scale = scale


class DecoderLayer(decoder.DecoderLayer):
    """Pre-norm. The outputs of attention and feed-forward are scaled before they are added.

    A layer may have several feed-forward parts, whose outputs are added.
    """

    residual_multiplier: float

    def forward(self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: LayerCache) -> ResidualStream:
        attention_norm, attention, mlp_norm, *mlps = self.parts
        normed, x = attention_norm(*stream, attention.readers)  # [T, E] each
        attended = attention(normed, angles, batch, cache) * self.residual_multiplier
        normed, x = mlp_norm(batch.attending(x), attended, mlps[0].readers)
        first, *others = (mlp(normed, batch) for mlp in mlps)
        return ResidualStream(x, sum(others, first) * self.residual_multiplier)


class ScaledHead(Linear):
    """A head whose logits are divided by a constant."""

    def __init__(self, embedding: Embedding, tied: bool, divisor: float) -> None:
        vocab_size, channels = embedding.shape
        super().__init__(channels, vocab_size, bias=False, embedding=embedding if tied else None)
        self.divisor = divisor

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        return super().forward(x, batch) / self.divisor


class GraniteLM(PreNormLM):
    """A model with Granite's factors. Its layers are `DecoderLayer`s."""

    def __init__(
        self, c: PreNormShape, multipliers: Multipliers, layers: Iterable[nn.Module], rotary: Rotary | None
    ) -> None:
        super().__init__(c, layers, rotary)
        self.lm_head = ScaledHead(self.embedding, c.tie_word_embeddings, multipliers.logits_divisor)  # type: ignore[arg-type]
        self.embedding_multiplier = multipliers.embedding
        for layer in self.layers:
            layer.residual_multiplier = multipliers.residual  # type: ignore[assignment]

    def embed(self, batch: Batch) -> ResidualStream:
        return ResidualStream(self.embedding(batch.token_ids) * self.embedding_multiplier)


class Granite(GraniteLM):
    def __init__(self, c: GraniteConfig) -> None:
        layers = (
            DecoderLayer(
                c,
                Attention(c, c.multipliers.attention, c.attention_bias),
                MLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, c.multipliers, layers, RotaryEmbedding(c.rotary))

"""Granite 3 (dense): Llama with a factor on each of embedding, attention, residual branches and logits."""

from dataclasses import dataclass

from torch import Tensor

from kernels.quantize_rows import Activations
from models import decoder
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLM
from models.families import llama
from models.families.llama import LlamaConfig
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.norm import ResidualStream
from models.layers.rotary import Angles


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def read_config(config: ConfigReader) -> GraniteConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    return GraniteConfig(
        **vars(llama.read_config(config)),
        embedding_multiplier=config.positive("embedding_multiplier", 1.0),
        attention_multiplier=config.positive("attention_multiplier", 1.0),
        residual_multiplier=config.positive("residual_multiplier", 1.0),
        logits_scaling=config.positive("logits_scaling", 1.0),
    )


class Attention(decoder.Attention):
    def __init__(self, c: GraniteConfig) -> None:
        super().__init__(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.scale = c.attention_multiplier


class DecoderLayer(decoder.DecoderLayer):
    """Pre-norm. The outputs of attention and feed-forward are scaled before they are added."""

    def __init__(self, c: GraniteConfig) -> None:
        super().__init__(c, Attention(c), MLP(c.hidden_size, c.intermediate_size, c.mlp_bias))
        self.residual_multiplier = c.residual_multiplier

    def forward(self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: LayerCache) -> ResidualStream:
        attention_norm, attention, mlp_norm, mlp = self.parts
        normed, x = attention_norm(*stream, attention.readers)  # [T, E] each
        attended = attention(normed, angles, batch, cache) * self.residual_multiplier
        normed, x = mlp_norm(batch.attending(x), attended, mlp.readers)
        return ResidualStream(x, mlp(normed, batch) * self.residual_multiplier)


class ScaledHead(Linear):
    """A head whose logits are divided by a constant."""

    def __init__(self, embedding: Embedding, tied: bool, divisor: float) -> None:
        vocab_size, channels = embedding.shape
        super().__init__(channels, vocab_size, bias=False, embedding=embedding if tied else None)
        self.divisor = divisor

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        return super().forward(x, batch) / self.divisor


class Granite(DecoderLM):
    config: GraniteConfig

    def __init__(self, c: GraniteConfig) -> None:
        super().__init__(c, (DecoderLayer(c) for _ in range(c.num_hidden_layers)))
        self.lm_head = ScaledHead(self.embedding, c.tie_word_embeddings, c.logits_scaling)  # type: ignore[arg-type]

    def embed(self, batch: Batch) -> ResidualStream:
        return ResidualStream(self.embedding(batch.token_ids) * self.config.embedding_multiplier)

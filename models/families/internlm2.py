"""InternLM2 and 2.5: Llama with one fused query, key and value projection, and its own module names (arXiv 2403.17297).

T tokens, H query heads, G key/value heads, D channels per head. Module names match the checkpoint's tensor names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM, read_decoder_config
from models.layers.attention import Heads, attend
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.rotary import Angles
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class InternLM2Config(DecoderConfig):
    bias: bool


def read_config(config: ConfigReader) -> InternLM2Config:
    """Read config.json, with defaults as in the original code.

    Raises UserError for missing, mistyped or unsupported values.
    """
    return InternLM2Config(
        **vars(read_decoder_config(config, rms_norm_eps=1e-6, max_position_embeddings=2048)),
        bias=config.get("bias", bool, True),
    )


class Attention(Module):
    def __init__(self, c: InternLM2Config) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.wqkv = Linear(c.hidden_size, sum(self.heads.fused) * c.head_dim, c.bias)
        self.wo = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, c.bias)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.wqkv]

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        query, key, value = self.heads.split_groups(self.wqkv(x, batch))
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        return self.wo(attend(query, cache, batch, self.head_dim**-0.5), batch)


class FeedForward(MLP):
    names = ("w1", "w3", "w2")


class InternLM2Layer(DecoderLayer):
    names = ("attention_norm", "attention", "ffn_norm", "feed_forward")


class InternLM2(DecoderLM):
    layout = ModelLayout(
        embedding="model.tok_embeddings",
        head="output",
        attention="attention",
        norms=("attention_norm", "ffn_norm"),
        scale_fold_targets={"w2": "w3"},
        row_parallel=("wo", "w2"),
        units={"wqkv": (Unit.KEY_VALUE_HEAD,)},
    )

    def __init__(self, c: InternLM2Config) -> None:
        layers = (
            InternLM2Layer(c, Attention(c), FeedForward(c.hidden_size, c.intermediate_size))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)

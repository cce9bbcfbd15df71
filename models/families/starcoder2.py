"""StarCoder 2 (arXiv 2402.19173): grouped-query rotary attention, LayerNorms with bias, a feed-forward without gate.

T tokens, E hidden channels, F feed-forward channels.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kernels.gelu import gelu_tanh
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.capabilities import ModelCapabilities
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, read_decoder_config
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layers.rotary import Angles, RotaryEmbedding
from models.layers.sliding_window import read_window
from models.layout import ModelLayout

UNUSED = (
    "activation_function",
    "layer_norm_epsilon",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
    "embedding_dropout",
    "residual_dropout",
)
"""Keys of the hub's files without effect. Other keys replace the first two, and the last two are training settings."""


@dataclass(frozen=True)
class Starcoder2Config(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    use_bias: bool
    sliding_window: int | None

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=self.sliding_window is not None)


def read_config(config: ConfigReader) -> Starcoder2Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    for key in UNUSED:
        config.raw(key)
    config.expect("mlp_type", (None, "default"), None)
    config.expect("norm_type", (None, "layer_norm"), None)
    shape = read_decoder_config(
        config, rms_norm_eps=1e-5, max_position_embeddings=4096, activations=("gelu_pytorch_tanh",)
    )
    return Starcoder2Config(
        **vars(shape)
        | {
            "rms_norm_eps": config.positive("norm_epsilon", 1e-5),
            "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
        },
        use_bias=config.get("use_bias", bool, True),
        sliding_window=read_window(config),
    )


class MLP(Module):
    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__()
        self.c_fc = Linear(c.hidden_size, c.intermediate_size, c.use_bias)
        self.c_proj = Linear(c.intermediate_size, c.hidden_size, c.use_bias)

    def forward(self, x: Activations, batch: Batch) -> Tensor:
        return self.c_proj(gelu_tanh(self.c_fc(x, batch)), batch)


class DecoderLayer(Module):
    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, c.sliding_window, c.use_bias, c.use_bias)
        self.post_attention_layernorm = LayerNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        normed = self.input_layernorm(x, self.self_attn.readers)
        x = batch.attending(x) + self.self_attn(normed, angles, batch, cache)
        return x + self.mlp(self.post_attention_layernorm(x, [self.mlp.c_fc]), batch)


class Decoder(Module):
    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = LayerNorm(c.hidden_size, c.rms_norm_eps)


class Starcoder2(CausalLM):
    layout = ModelLayout(
        scale_fold_targets={"o_proj": "v_proj"},
        row_parallel=("o_proj", "c_proj"),
    )

    def __init__(self, c: Starcoder2Config) -> None:
        super().__init__(c)
        self.model = Decoder(c)
        self.lm_head = make_head(self.model.embed_tokens, c.tie_word_embeddings)
        self.rotary = RotaryEmbedding(c.rotary)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Angles]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)

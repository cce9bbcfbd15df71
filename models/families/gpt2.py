"""GPT-2 and models of its architecture.

T tokens, H heads, D channels per head, E hidden channels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import AttentionConfig
from models.layer_norm_decoder import LayerNormLM, SequentialLayer
from models.layers.attention import Heads, attend
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import GELUS, UngatedMLP
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class GPTConfig(AttentionConfig):
    """The config of a GPT with learned positions. `rms_norm_eps` is the epsilon of the LayerNorms."""

    max_position_embeddings: int
    activation_function: str

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings


@dataclass(frozen=True)
class GPT2Config(GPTConfig):
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool


def read_config(config: ConfigReader) -> GPT2Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    return GPT2Config(
        **vars(read_shape(config)),
        scale_attn_weights=config.get("scale_attn_weights", bool, True),
        scale_attn_by_inverse_layer_idx=config.get("scale_attn_by_inverse_layer_idx", bool, False),
    )


def read_shape(config: ConfigReader, activation: str = "gelu_new") -> GPTConfig:
    """Read GPT-2's keys. `activation` is the default."""
    config.expect("add_cross_attention", (False,), False)
    hidden_size, heads = config.count("n_embd"), config.count("n_head")
    config.check_multiple("n_embd", hidden_size, "n_head", heads)
    return GPTConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("n_inner", 4 * hidden_size),
        num_hidden_layers=config.num_layers("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=config.count("n_positions", 1024),
        rms_norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        activation_function=config.expect("activation_function", tuple(GELUS), activation),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
    )


class Attention(Module):
    def __init__(self, c: GPT2Config, index: int) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            self.scale /= index + 1
        self.c_attn = Linear(c.hidden_size, 3 * c.hidden_size, is_transposed=True)
        self.c_proj = Linear(c.hidden_size, c.hidden_size, is_transposed=True)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.c_attn]

    def forward(self, x: Activations, angles: None, batch: Batch, cache: LayerCache) -> Tensor:
        query, key, value = self.c_attn(x, batch).unflatten(-1, (3, -1, self.head_dim)).unbind(1)  # [T, H, D] each
        kv_store(key, value, *cache, batch.slots)
        return self.c_proj(attend(query, cache, batch, self.scale), batch)


class MLP(UngatedMLP):
    names = ("c_fc", "c_proj")


class Block(SequentialLayer):
    names = ("ln_1", "attn", "ln_2", "mlp")


class GPTLM(LayerNormLM):
    """A model with learned positions and GPT-2's module names."""

    layout = ModelLayout(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="attn",
        norms=("ln_1", "ln_2"),
        scale_fold_targets={},
        row_parallel=("c_proj",),
        replicated=("wpe",),
        units={"c_attn": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD)},
    )

    def __init__(self, c: GPTConfig, attentions: Iterable[nn.Module], is_transposed: bool = False) -> None:
        """`is_transposed`: as of `Linear`, for the feed-forward layers."""
        sizes, activation = (c.hidden_size, c.intermediate_size), GELUS[c.activation_function]
        layers = (
            Block((_norm(c), _norm(c)), attention, MLP(*sizes, True, activation, is_transposed))
            for attention in attentions
        )
        positions = Embedding(c.max_position_embeddings, c.hidden_size)
        super().__init__(c, layers, _norm(c), {"transformer.wpe": positions})

    def embed(self, batch: Batch) -> Tensor:
        positions: Tensor = self.transformer.wpe(batch.positions)  # type: ignore[operator, union-attr]
        embedded: Tensor = self.embedding(batch.token_ids)
        return embedded + positions

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[None]:
        return (None,)


def _norm(c: GPTConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps)


class GPT2(GPTLM):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__(c, (Attention(c, index) for index in range(c.num_hidden_layers)), is_transposed=True)

"""BLOOM (arXiv 2211.05100) and BLOOMZ.

T tokens, H heads, D channels per head, E hidden channels, V vocabulary, R output rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.gelu import gelu_tanh
from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.layers.attention import Heads, alibi_slopes, attend
from models.layers.constant import Constant
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class BloomConfig(ModelShape):
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    seq_length: int
    layer_norm_epsilon: float
    apply_residual_connection_post_layernorm: bool

    @property
    def context_length(self) -> int:
        """The training length. ALiBi itself sets no limit."""
        return self.seq_length


def read_config(config: ConfigReader) -> BloomConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    # The first files on the hub use n_embed and num_attention_heads.
    hidden_size = config.count("n_embed" if config.raw("n_embed") is not None else "hidden_size")
    heads = config.count("num_attention_heads" if config.raw("n_head") is None else "n_head")
    config.check_multiple("hidden_size", hidden_size, "n_head", heads)
    config.expect("n_inner", (None, 4 * hidden_size), None)
    return BloomConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=config.num_layers("num_hidden_layers" if config.raw("n_layer") is None else "n_layer"),
        num_attention_heads=heads,
        head_dim=hidden_size // heads,
        seq_length=config.count("seq_length", 2048),
        layer_norm_epsilon=config.positive("layer_norm_epsilon", 1e-5),
        apply_residual_connection_post_layernorm=config.get("apply_residual_connection_post_layernorm", bool, False),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
    )


class Attention(Module):
    def __init__(self, c: BloomConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.query_key_value = Linear(c.hidden_size, 3 * c.hidden_size)
        self.dense = Linear(c.hidden_size, c.hidden_size)

    def forward(self, x: Activations, slopes: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        fused = self.query_key_value(x, batch).unflatten(-1, (-1, 3, self.head_dim))  # [T, H, 3, D]
        query, key, value = fused.unbind(2)  # [T, H, D] each
        kv_store(key, value, *cache, batch.slots)
        attended = attend(query, cache, batch, self.head_dim**-0.5, alibi_slopes=self.heads.slice_queries(slopes))
        return self.dense(attended, batch)


class MLP(Module):
    def __init__(self, c: BloomConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = Linear(c.hidden_size, 4 * c.hidden_size)
        self.dense_4h_to_h = Linear(4 * c.hidden_size, c.hidden_size)

    def forward(self, x: Activations, batch: Batch) -> Tensor:
        return self.dense_4h_to_h(gelu_tanh(self.dense_h_to_4h(x, batch)), batch)


class Block(Module):
    def __init__(self, c: BloomConfig) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.hidden_size, c.layer_norm_epsilon)
        self.self_attention = Attention(c)
        self.post_attention_layernorm = LayerNorm(c.hidden_size, c.layer_norm_epsilon)
        self.mlp = MLP(c)
        self.keeps_normed = c.apply_residual_connection_post_layernorm

    def forward(self, x: Tensor, slopes: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        if self.keeps_normed:  # the residual stream continues from the normed state
            x = self.input_layernorm(x)
            x = batch.attending(x) + self.self_attention(x, slopes, batch, cache)
            x = self.post_attention_layernorm(x)
            return x + self.mlp(x, batch)
        normed = self.input_layernorm(x, [self.self_attention.query_key_value])
        x = batch.attending(x) + self.self_attention(normed, slopes, batch, cache)
        return x + self.mlp(self.post_attention_layernorm(x, [self.mlp.dense_h_to_4h]), batch)


class Transformer(Module):
    def __init__(self, c: BloomConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)
        self.word_embeddings_layernorm = LayerNorm(c.hidden_size, c.layer_norm_epsilon)
        self.h = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.ln_f = LayerNorm(c.hidden_size, c.layer_norm_epsilon)


class Bloom(CausalLM):
    layout = ModelLayout(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="self_attention",
        scale_fold_targets={},
        row_parallel=("dense", "dense_4h_to_h"),
        units={"query_key_value": (Unit.QKV_HEAD,)},
    )

    def __init__(self, c: BloomConfig) -> None:
        super().__init__(c)
        self.transformer = Transformer(c)
        self.lm_head = make_head(self.transformer.word_embeddings, c.tie_word_embeddings)
        self.slopes = Constant(alibi_slopes(c.num_attention_heads))  # [H]

    def embed(self, batch: Batch) -> Tensor:
        embedded: Tensor = self.transformer.word_embeddings(batch.token_ids)
        return self.transformer.word_embeddings_layernorm(embedded)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor]:
        return (self.slopes.on(batch.positions.device),)

"""OPT (arXiv 2205.01068) and Galactica.

T tokens, H heads, D channels per head, E hidden channels, P channels of an embedding, V vocabulary, R output rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import relu

from kernels.gelu import gelu
from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.layers.attention import Heads, attend, merge_qkv
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layout import ModelLayout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "gelu": gelu}  # of OPT, and of Galactica
POSITION_OFFSET = 2  # the first rows of the table were for padding


@dataclass(frozen=True)
class OPTConfig(ModelShape):
    hidden_size: int
    ffn_dim: int
    word_embed_proj_dim: int
    num_attention_heads: int
    head_dim: int
    max_position_embeddings: int
    activation_function: str
    do_layer_norm_before: bool
    has_final_layer_norm: bool
    enable_bias: bool
    layer_norm_elementwise_affine: bool

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings


def read_config(config: ConfigReader) -> OPTConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    norm_before = config.get("do_layer_norm_before", bool, True)
    removed = config.get("_remove_final_layer_norm", bool, False)
    return OPTConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        ffn_dim=config.count("ffn_dim"),
        word_embed_proj_dim=config.count("word_embed_proj_dim", hidden_size),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=config.count("max_position_embeddings", 2048),
        activation_function=config.expect("activation_function", tuple(ACTIVATIONS), "relu"),
        do_layer_norm_before=norm_before,
        has_final_layer_norm=norm_before and not removed,
        enable_bias=config.get("enable_bias", bool, True),
        layer_norm_elementwise_affine=config.get("layer_norm_elementwise_affine", bool, True),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
    )


def layer_norm(c: OPTConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, elementwise_affine=c.layer_norm_elementwise_affine)


class Attention(Module):
    def __init__(self, c: OPTConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.qkv = merge_qkv(self, c.hidden_size, self.heads, bias=c.enable_bias)
        self.out_proj = Linear(c.hidden_size, c.hidden_size, bias=c.enable_bias)

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, batch: Batch, cache: LayerCache) -> Tensor:
        projected = self.qkv(x, batch)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D] each
        kv_store(key, value, *cache, batch.slots)
        return self.out_proj(attend(query, cache, batch, self.head_dim**-0.5), batch)


class DecoderLayer(Module):
    def __init__(self, c: OPTConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.self_attn_layer_norm = layer_norm(c)
        self.fc1 = Linear(c.hidden_size, c.ffn_dim, bias=c.enable_bias)
        self.fc2 = Linear(c.ffn_dim, c.hidden_size, bias=c.enable_bias)
        self.final_layer_norm = layer_norm(c)
        self.activation = ACTIVATIONS[c.activation_function]
        self.norm_before = c.do_layer_norm_before

    def forward(self, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        if self.norm_before:
            normed = self.self_attn_layer_norm(x, self.self_attn.qkv.layers)
            x = batch.attending(x) + self.self_attn(normed, batch, cache)
            return x + self._mlp(self.final_layer_norm(x, [self.fc1]), batch)
        x = self.self_attn_layer_norm(batch.attending(x) + self.self_attn(x, batch, cache))
        return self.final_layer_norm(x + self._mlp(x, batch))

    def _mlp(self, x: Activations, batch: Batch) -> Tensor:
        return self.fc2(self.activation(self.fc1(x, batch)), batch)


class Decoder(Module):
    def __init__(self, c: OPTConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.word_embed_proj_dim)
        self.embed_positions = Embedding(c.max_position_embeddings + POSITION_OFFSET, c.hidden_size)
        self.is_projected = c.word_embed_proj_dim != c.hidden_size
        if self.is_projected:
            self.project_in = Linear(c.word_embed_proj_dim, c.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.num_hidden_layers))
        self.has_final_layer_norm = c.has_final_layer_norm
        if c.has_final_layer_norm:
            self.final_layer_norm = layer_norm(c)
        if self.is_projected:
            self.project_out = Linear(c.hidden_size, c.word_embed_proj_dim, bias=False)


class Model(Module):
    def __init__(self, c: OPTConfig) -> None:
        super().__init__()
        self.decoder = Decoder(c)


class OPT(CausalLM):
    layout = ModelLayout(
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        scale_fold_targets={},
        row_parallel=("out_proj", "fc2"),
        replicated=("embed_positions", "project_in", "project_out"),
    )

    def __init__(self, c: OPTConfig) -> None:
        super().__init__(c)
        self.model = Model(c)
        self.lm_head = make_head(self.model.decoder.embed_tokens, c.tie_word_embeddings)

    def embed(self, batch: Batch) -> Tensor:
        decoder = self.model.decoder
        x: Tensor = decoder.embed_tokens(batch.token_ids)  # [T, P]
        if decoder.is_projected:
            x = decoder.project_in(x, batch)  # [T, E]
        return x + decoder.embed_positions(batch.positions + POSITION_OFFSET)

    def finish(self, x: Tensor) -> Tensor:
        decoder = self.model.decoder
        if decoder.has_final_layer_norm:
            x = decoder.final_layer_norm(x)
        return decoder.project_out(x, None) if decoder.is_projected else x  # [R, P]

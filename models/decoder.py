"""The decoder of Llama and of the many that kept its form: pre-norm layers of rotary attention and a gated feed-forward.

An architecture's file says what differs in it. Modules are named as the checkpoint's tensors are.
T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, F feed-forward channels, V vocabulary, R output rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from models.batch import Batch, KVCache, LayerCache
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.layers.attention import attend
from models.layers.embedding import Embedding
from models.layers.linear import Linear, linear_swiglu, linear_together, make_head
from models.layers.norm import AddRMSNorm, ResidualStream
from models.layers.rotary import RotaryConfig, RotaryEmbedding, read_rotary_config


@dataclass(frozen=True)
class DecoderConfig(ModelShape):
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rotary: RotaryConfig

    @property
    def context_length(self) -> int:
        return self.rotary.context_length

    @property
    def keys_depend_on_length(self) -> bool:
        return self.rotary.type == "dynamic"


def read_decoder_config(
    config: ConfigReader, rms_norm_eps: float | None = None, max_position_embeddings: int | None = None
) -> DecoderConfig:
    """The keys that all these architectures have; two of them with the defaults of those whose older files lack them.

    Raises UserError for a missing key, a wrong type or a value that is not implemented.
    """
    config.expect("hidden_act", ("silu",), "silu")
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    if heads % groups:
        raise UserError(f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    if config.raw("head_dim") is None and hidden_size % heads:
        raise UserError(f"config.json: hidden_size={hidden_size} is not a multiple of num_attention_heads={heads}")
    head_dim = config.count("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim={head_dim} is odd, but rotary embedding turns pairs of channels")
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        num_hidden_layers=config.count("num_hidden_layers"),
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_attention_heads=heads,
        rms_norm_eps=config.positive("rms_norm_eps", rms_norm_eps),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=read_rotary_config(config, head_dim, config.count("max_position_embeddings", max_position_embeddings)),
    )


class Attention(nn.Module):
    """Heads in groups that share keys and values (arXiv 2305.13245), over everything before or over a window."""

    def __init__(
        self, c: DecoderConfig, window: int | None = None, qkv_bias: bool = False, o_bias: bool = False
    ) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.window = window
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=qkv_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=o_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        projected = linear_together(x, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query = rope_and_store(query, key, value, cos, sin, *cache, batch.slots)
        attended = attend(query, cache, batch, self.head_dim**-0.5, window=self.window)
        return self.o_proj(attended)  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(linear_swiglu(x, self.gate_proj, self.up_proj, into=self.down_proj))  # type: ignore[no-any-return]


class Sizes(Protocol):
    """What a decoder of any kind of attention and feed-forward layers has in its config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Rotary(Protocol):
    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's angles, from int64 [T] twice."""


class DecoderLayer(nn.Module):
    def __init__(self, c: Sizes, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, stream: ResidualStream, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache
    ) -> ResidualStream:
        normed, x = self.input_layernorm(*stream)  # [T, E] each
        normed, x = self.post_attention_layernorm(batch.attending(x), self.self_attn(normed, cos, sin, batch, cache))
        return ResidualStream(x, self.mlp(normed))


class Decoder(nn.Module):
    def __init__(self, c: Sizes, layers: Iterable[nn.Module], rotary: Rotary) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = rotary

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        stream = ResidualStream(self.embed_tokens(batch.token_ids))
        cos, sin = self.rotary.angles(batch.positions, batch.prompt_lengths, stream.x.dtype)
        for layer, layer_batch, layer_cache in zip(
            self.layers, batch.by_layer(len(self.layers)), cache.layers, strict=True
        ):
            stream = layer(stream, cos, sin, layer_batch, layer_cache)
        normed, _ = self.norm(*stream)  # [R, E]
        return normed  # type: ignore[no-any-return]


class DecoderLM(CausalLM):
    """A decoder of these layers, and the head, which may be the embedding."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers, RotaryEmbedding(config.rotary))
        self.lm_head = make_head(self.model.embed_tokens, config.tie_word_embeddings)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.model(batch, cache)  # type: ignore[no-any-return]

"""The decoder of Llama and of the architectures that follow it: pre-norm layers, rotary attention, gated feed-forward.

The file of an architecture defines its differences. Module names match the checkpoint's tensor names.
T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, F feed-forward channels, V
vocabulary, R output rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import kv_store, rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache, LayerState
from models.capabilities import ModelCapabilities
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.layers.attention import Heads, attend, merge_qkv
from models.layers.embedding import Embedding
from models.layers.linear import Linear, make_head
from models.layers.module import Module
from models.layers.named_parts import NamedParts, register
from models.layers.norm import AddRMSNorm, ResidualStream, RMSNorm
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding, read_rotary_config


@dataclass(frozen=True)
class PreNormShape(ModelShape):
    """The config of a model of pre-norm layers with any attention and feed-forward."""

    norm_weight_offset: ClassVar[float | None] = None
    """Of all norms of the residual stream, as of `RMSNorm`."""
    norms_have_weights: ClassVar[bool] = True
    """Of the same norms."""
    hidden_size: int
    rms_norm_eps: float


@dataclass(frozen=True)
class AttentionConfig(PreNormShape):
    """The config of a model with attention in its layers, whose positions are encoded in any way."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class DecoderConfig(AttentionConfig):
    rotary: RotaryConfig

    @property
    def context_length(self) -> int:
        return self.rotary.context_length

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(keys_depend_on_length=self.rotary.type == "dynamic")


@dataclass(frozen=True)
class WindowedConfig(DecoderConfig):
    """The config of a model in which some layers use sliding-window attention."""

    windows: tuple[int | None, ...]
    """The window of each layer. None: full attention."""

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=any(window is not None for window in self.windows))


@dataclass(frozen=True)
class RecurrentConfig(DecoderConfig):
    """The config of a model in which some layers are recurrent instead of attention."""

    is_recurrent: tuple[bool, ...]
    """For each layer."""

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, is_recurrent=any(self.recurrent_layers))

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        return self.is_recurrent[: self.num_hidden_layers]


def read_decoder_config(
    config: ConfigReader,
    rms_norm_eps: float | None = None,
    max_position_embeddings: int | None = None,
    read_rotary: Callable[[ConfigReader, int, int], RotaryConfig] | None = None,
    activations: tuple[str, ...] = ("silu",),
    intermediate_size: int | None = None,
    theta: float = 10000.0,
) -> DecoderConfig:
    """Read the keys that these architectures share.

    rms_norm_eps, max_position_embeddings, intermediate_size: the defaults of architectures whose files may lack these
    keys. `read_rotary` takes the arguments of `read_rotary_config`, which is used if it is None, with `theta` as the
    default base. `activations`: the supported values of hidden_act, the default first. Raises UserError for a missing
    key, a wrong type or an unsupported value.
    """
    config.activation(activations, activations[0])
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    if config.raw("head_dim") is None:
        config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    head_dim = config.count("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise UserError(
            f"config.json: head_dim={head_dim} is odd, but rotary embedding rotates pairs of channels: give an even head_dim"
        )
    max_position_embeddings = config.count("max_position_embeddings", max_position_embeddings)
    read_rotary = read_rotary or partial(read_rotary_config, default_theta=theta)
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        num_hidden_layers=config.num_layers(),
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size", intermediate_size),
        num_attention_heads=heads,
        rms_norm_eps=config.positive("rms_norm_eps", rms_norm_eps),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=read_rotary(config, head_dim, max_position_embeddings),
    )


class Attention(Module):
    """Grouped-query attention (arXiv 2305.13245): full, with a sliding window, or in chunks of tokens."""

    soft_cap: float | None = None
    chunk: int | None = None
    output_name: ClassVar[str] = "o_proj"
    """The name of the output projection."""

    def __init__(
        self, c: AttentionConfig, window: int | None = None, qkv_bias: bool = False, o_bias: bool = False
    ) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.window = window
        self.qkv = merge_qkv(self, c.hidden_size, self.heads, qkv_bias)
        self.add_module(self.output_name, Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=o_bias))

    @property
    def readers(self) -> Sequence[Linear]:
        """The linear layers that read x, if no other module reads it: the norm before them quantises for them."""
        return self.qkv.layers

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        projected = self.qkv(x, batch)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query = self.turn_and_store(query, key, value, angles, batch, cache)
        attended = attend(query, cache, batch, self.scale, self.soft_cap, self.window, chunk=self.chunk)
        return self.project(attended, batch)

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        """Return the rotated query [T, H, D], and store the rotated key and the value in the cache."""
        return rope_and_store(query, key, value, *angles, *cache, batch.slots)

    def project(self, attended: Tensor, batch: Batch) -> Tensor:
        """Return the output [R, E] of the attended values [R, H * D]."""
        output: Tensor = getattr(self, self.output_name)(attended, batch)
        return output


class InterleavedRopeAttention(Attention):
    """Attention that rotates pairs of adjacent channels instead of pairs that are half a head apart."""

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        return rope_and_store(query, key, value, *angles, *cache, batch.slots, interleaved=True)


class NoPEAttention(Attention):
    """Attention without position encoding (NoPE, arXiv 2305.19466)."""

    def turn_and_store(
        self, query: Tensor, key: Tensor, value: Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> Tensor:
        kv_store(key, value, *cache, batch.slots)
        return query


class Rotary(Protocol):
    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> Any:
        """Return what the attention layers take: cos and sin of the rotation angles, or more.

        positions and prompt_lengths: [T] int64.
        """


def residual_norm(c: PreNormShape) -> AddRMSNorm:
    return AddRMSNorm(c.hidden_size, c.rms_norm_eps, c.norm_weight_offset, c.norms_have_weights)


class DecoderLayer(NamedParts):
    """Pre-norm: y = x + attention(norm(x)), then y + mlp(norm(y)).

    The parts are called as `Attention` and `MLP` are, and have `readers`.
    """

    names: tuple[str, ...] = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(self, c: PreNormShape, self_attn: nn.Module, *mlps: nn.Module) -> None:
        """`mlps`: one, unless the subclass computes several."""
        super().__init__(residual_norm(c), self_attn, residual_norm(c), *mlps)

    def forward(self, stream: ResidualStream, angles: Any, batch: Batch, cache: LayerCache) -> ResidualStream:
        attention_norm, attention, mlp_norm, mlp = self.parts
        normed, x = attention_norm(*stream, attention.readers)  # [T, E] each
        attended = attention(normed, angles, batch, cache)
        normed, x = mlp_norm(batch.attending(x), attended, mlp.readers)
        return ResidualStream(x, mlp(normed, batch))


class BranchNormLayer(DecoderLayer):
    """Pre-norm with a norm of each branch: y = x + norm(attention(norm(x))), then y + norm(mlp(norm(y)))."""

    branch_norms: tuple[str, str]

    def __init__(self, c: PreNormShape, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, self_attn, mlp)
        for name in self.branch_norms:
            self.add_module(name, RMSNorm(c.hidden_size, c.rms_norm_eps, c.norm_weight_offset))

    def forward(self, stream: ResidualStream, angles: Any, batch: Batch, cache: LayerCache) -> ResidualStream:
        attention_norm, attention, mlp_norm, mlp = self.parts
        branch_norm, mlp_branch_norm = (getattr(self, name) for name in self.branch_norms)
        normed, x = attention_norm(*stream, attention.readers)  # [T, E] each
        attended = branch_norm(attention(normed, angles, batch, cache))
        normed, x = mlp_norm(batch.attending(x), attended, mlp.readers)
        return ResidualStream(x, mlp_branch_norm(mlp(normed, batch)))


class MixerLayer(NamedParts):
    """Pre-norm with one part: x + mixer(norm(x)). The mixer is called as `Attention` is, and has `readers`."""

    names = ("norm", "mixer")

    def __init__(self, c: PreNormShape, mixer: nn.Module) -> None:
        super().__init__(residual_norm(c), mixer)

    def forward(
        self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: LayerCache | LayerState
    ) -> ResidualStream:
        norm, mixer = self.parts
        normed, x = norm(*stream, mixer.readers)  # [T, E] each
        return ResidualStream(batch.attending(x), mixer(normed, angles, batch, cache))


class PreNormLM(CausalLM):
    """A model of `DecoderLayer`s with any attention and feed-forward. `layout` defines its module names."""

    config: PreNormShape

    def __init__(self, config: PreNormShape, layers: Iterable[nn.Module], rotary: Rotary | None) -> None:
        """`rotary` is None if the layers encode positions in another way."""
        super().__init__(config)
        embedding = Embedding(config.vocab_size, config.hidden_size)
        register(self, self.layout.embedding, embedding)
        register(self, self.layout.layers, nn.ModuleList(layers))
        register(self, self.layout.final_norm, residual_norm(config))
        register(self, self.layout.head, make_head(embedding, config.tie_word_embeddings))
        self.rotary = rotary

    def embed(self, batch: Batch) -> ResidualStream:
        return ResidualStream(self.embedding(batch.token_ids))

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Any]:
        return (None if self.rotary is None else self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)

    def received_stream(self, x: Tensor) -> ResidualStream:
        return ResidualStream(x)

    def finish(self, stream: ResidualStream) -> Tensor:
        normed: Tensor = self.final_norm(*stream)[0]
        return normed


class DecoderLM(PreNormLM):
    """A model of decoder layers with rotary attention."""

    def __init__(self, config: DecoderConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__(config, layers, RotaryEmbedding(config.rotary))

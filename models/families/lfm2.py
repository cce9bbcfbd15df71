"""LFM2 and LFM2.5 (arXiv 2511.23404): most layers are short convolutions, the others are Qwen 3's attention.

T tokens, H query heads, G key/value heads, D channels per head. Module names match the checkpoint's tensor names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM, RecurrentConfig
from models.layers.attention import Heads, attend, merge_qkv
from models.layers.layer_types import FULL, agreed_types, check_layer_types, read_num_taps, types_of_indices
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.norm import RMSNorm
from models.layers.rotary import Angles, read_rotary_config
from models.layers.short_conv import ShortConv
from models.layout import ModelLayout

CONV = "conv"


@dataclass(frozen=True)
class Lfm2Config(RecurrentConfig):
    num_taps: int
    """The tokens that a convolution reads, with the token itself."""
    conv_bias: bool


def read_config(config: ConfigReader) -> Lfm2Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for contradicting kinds of layers.
    """
    return read_shape(config, _intermediate_size(config))


def read_shape(config: ConfigReader, intermediate_size: int) -> Lfm2Config:
    """Read the keys of all layers except the feed-forward layers. Raises UserError as `read_config` does."""
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups, num_layers = config.count("num_key_value_heads"), config.num_layers()
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    head_dim = config.count("head_dim", hidden_size // heads)
    if head_dim % 2:
        problem = f"config.json: head_dim={head_dim} is odd, but rotary embedding rotates pairs of channels"
        raise UserError(f"{problem}: give an even head_dim")
    for key, value in (("block_dim", hidden_size), ("conv_dim", hidden_size), ("conv_dim_out", hidden_size)):
        config.expect(key, (value, None), None)
    config.expect("num_heads", (heads, None), None)
    for key in ("use_pos_enc", "block_use_swiglu"):
        config.expect(key, (True, None), None)
    context_length = config.count("max_position_embeddings", 128000)
    return Lfm2Config(
        vocab_size=config.count("vocab_size"),
        num_hidden_layers=num_layers,
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        rms_norm_eps=config.positive("norm_eps", 1e-5),
        tie_word_embeddings=config.get("tie_embedding", bool, config.get("tie_word_embeddings", bool, True)),
        rotary=read_rotary_config(config, head_dim, context_length, default_theta=1e6),
        num_taps=read_num_taps(config, "conv_L_cache", 3),
        conv_bias=config.get("conv_bias", bool, False),
        is_recurrent=_read_kinds(config, num_layers),
    )


def _intermediate_size(config: ConfigReader) -> int:
    """Return the feed-forward channels: block_ff_dim itself, or two thirds of it, times a factor, rounded up."""
    size = config.count("block_ff_dim", config.count("intermediate_size", 12288))
    factor, multiple = config.positive("block_ffn_dim_multiplier", 1.0), config.count("block_multiple_of", 256)
    if not config.get("block_auto_adjust_ff_dim", bool, True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def _read_kinds(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent, from `layer_types` or the older `full_attn_idxs`."""
    types, indices = config.raw("layer_types"), config.raw("full_attn_idxs")
    of_indices = None if indices is None else types_of_indices("full_attn_idxs", indices, CONV, num_layers)
    types = agreed_types(config, "layer_types", types, "full_attn_idxs", of_indices)
    types = [FULL] * num_layers if types is None else types
    return check_layer_types(types, CONV, num_layers)


class Attention(Module):
    """Grouped-query attention with a norm on each head's query and key before the rotation."""

    def __init__(self, c: Lfm2Config) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.qkv = merge_qkv(self, c.hidden_size, self.heads, bias=False)
        self.q_layernorm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_layernorm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.out_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.qkv.layers

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        head_dim, norms = self.heads.head_dim, (self.q_layernorm.weight, self.k_layernorm.weight)
        query, key, value = (y.unflatten(-1, (-1, head_dim)) for y in self.qkv(x, batch))  # [T, H, D], [T, G, D] twice
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots, False, *norms, self.q_layernorm.eps)
        return self.out_proj(attend(query, cache, batch, head_dim**-0.5), batch)


class FeedForward(MLP):
    names = ("w1", "w3", "w2")


class AttentionLayer(DecoderLayer):
    names = ("operator_norm", "self_attn", "ffn_norm", "feed_forward")


class ConvLayer(DecoderLayer):
    names = ("operator_norm", "conv", "ffn_norm", "feed_forward")


def make_layer(c: Lfm2Config, is_recurrent: bool, feed_forward: nn.Module) -> DecoderLayer:
    if is_recurrent:
        return ConvLayer(c, ShortConv(c.hidden_size, c.num_taps, c.conv_bias), feed_forward)
    return AttentionLayer(c, Attention(c), feed_forward)


class Lfm2(DecoderLM):
    layout = ModelLayout(
        final_norm="model.embedding_norm",
        recurrent="conv",
        norms=("operator_norm", "ffn_norm"),
        scale_fold_targets={"w2": "w3"},
        row_parallel=("out_proj", "w2"),
    )

    def __init__(self, c: Lfm2Config) -> None:
        super().__init__(
            c,
            (
                make_layer(c, is_recurrent, FeedForward(c.hidden_size, c.intermediate_size))
                for is_recurrent in c.recurrent_layers
            ),
        )

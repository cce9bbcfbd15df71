"""MPT (MosaicML): LayerNorms without bias, positions by ALiBi, and no biases in linear layers.

T tokens, H heads, D channels per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.gelu import gelu
from kernels.kv_store import kv_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import AttentionConfig
from models.layer_norm_decoder import LayerNormLM, SequentialLayer
from models.layers.attention import Heads, alibi_slopes, attend
from models.layers.constant import Constant
from models.layers.linear import Linear
from models.layers.mlp import UngatedMLP
from models.layers.module import Module
from models.layers.norm import LayerNorm
from models.layout import ModelLayout, Unit

UNUSED = (
    "emb_pdrop",
    "embedding_fraction",
    "init_config",
    "init_device",
    "learned_pos_emb",
    "norm_type",
    "tokenizer_name",
    "verbose",
)
"""Keys without effect on a model with ALiBi: transformers has one form of the norm."""
UNUSED_IN_ATTENTION = (
    *("attn_impl", "attn_pdrop", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id"),
    *("output_attentions", "output_hidden_states", "return_dict"),
)
"""The last seven are keys of a whole model, which transformers 5 also writes into `attn_config`."""


@dataclass(frozen=True)
class MptConfig(AttentionConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    max_seq_len: int
    clip_qkv: float | None
    softmax_scale: float

    @property
    def context_length(self) -> int:
        """The training length. ALiBi itself sets no limit."""
        return self.max_seq_len


def read_config(config: ConfigReader) -> MptConfig:
    """Read config.json, with defaults as in transformers. Raises UserError for mistyped or unsupported values."""
    for key in UNUSED:
        config.raw(key)
    config.expect("no_bias", (True,), True)
    config.expect("logit_scale", (None,), None)  # transformers ignores it
    config.expect("expansion_ratio", (4,), 4)
    hidden_size, heads = config.count("d_model"), config.count("n_heads")
    config.check_multiple("d_model", hidden_size, "n_heads", heads)
    attention = config.section("attn_config") or ConfigReader({}, "config.json: attn_config")
    for key in UNUSED_IN_ATTENTION:
        attention.raw(key)
    attention.expect("alibi", (True,), True)
    attention.expect("attn_type", ("multihead_attention", None), None)
    for key in ("attn_uses_sequence_id", "prefix_lm", "qk_ln"):
        attention.expect(key, (False, None), None)
    softmax_scale = attention.positive("softmax_scale", (hidden_size // heads) ** -0.5)
    clip_qkv = attention.positive("clip_qkv") if attention.raw("clip_qkv") else None
    attention.expect("alibi_bias_max", (8,), 8)  # transformers ignores it
    if unknown := attention.unread():
        raise UserError(f"config.json: attn_config has fields that are not supported: {', '.join(unknown)}")
    return MptConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=config.num_layers("n_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        rms_norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        max_seq_len=config.count("max_seq_len", 2048),
        clip_qkv=clip_qkv,
        softmax_scale=softmax_scale,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
    )


class Attention(Module):
    def __init__(self, c: MptConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_attention_heads, c.head_dim, c.head_dim)
        self.head_dim, self.scale, self._clip = c.head_dim, c.softmax_scale, c.clip_qkv
        self.Wqkv = Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.out_proj = Linear(c.hidden_size, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.Wqkv]

    def forward(self, x: Activations, slopes: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        fused = self.Wqkv(x, batch)
        if self._clip is not None:
            fused = fused.clamp(-self._clip, self._clip)
        query, key, value = fused.unflatten(-1, (3, -1, self.head_dim)).unbind(1)  # [T, H, D] each
        kv_store(key, value, *cache, batch.slots)
        attended = attend(query, cache, batch, self.scale, alibi_slopes=self.heads.slice_queries(slopes))
        return self.out_proj(attended, batch)


class Block(SequentialLayer):
    names = ("norm_1", "attn", "norm_2", "ffn")


class Mpt(LayerNormLM):
    layout = ModelLayout(
        embedding="transformer.wte",
        layers="transformer.blocks",
        final_norm="transformer.norm_f",
        attention="attn",
        norms=("norm_1", "norm_2"),
        scale_fold_targets={},
        row_parallel=("out_proj", "down_proj"),
        units={"Wqkv": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD)},
    )

    def __init__(self, c: MptConfig) -> None:
        layers = (
            Block(
                (_norm(c), _norm(c)),
                Attention(c),
                UngatedMLP(c.hidden_size, c.intermediate_size, False, gelu),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, _norm(c))
        self.slopes = Constant(alibi_slopes(c.num_attention_heads))  # [H]

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor]:
        return (self.slopes.on(batch.positions.device),)


def _norm(c: MptConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps, bias=False)

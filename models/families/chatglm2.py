"""ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B in their original layout. ChatGLM-6B is in chatglm.py.

T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, V vocabulary, R output rows.
The first half of a head's channels is rotated, in pairs of adjacent channels. Module names match the checkpoint's
tensor names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM, PreNormShape
from models.layers.attention import Heads, attend
from models.layers.linear import Linear
from models.layers.mlp import FusedMLP
from models.layers.module import Module
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class ChatGLM2Config(PreNormShape):
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    add_qkv_bias: bool
    rotary: RotaryConfig

    @property
    def context_length(self) -> int:
        return self.rotary.max_position_embeddings


def read_config(config: ConfigReader) -> ChatGLM2Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    for key, value in (
        ("add_bias_linear", False),
        ("apply_residual_connection_post_layernorm", False),
        ("fp32_residual_connection", False),
        ("interleaved_qkv", False),
        ("multi_query_attention", True),
        ("original_rope", True),
        ("post_layer_norm", True),
        ("rmsnorm", True),
        ("tie_word_embeddings", False),
    ):
        config.expect(key, (value, None), value)
    config.expect("pre_seq_len", (None,), None)
    config.expect("quantization_bit", (None, 0), None)
    heads, groups = config.count("num_attention_heads"), config.count("multi_query_group_num")
    config.check_multiple("num_attention_heads", heads, "multi_query_group_num", groups)
    head_dim, layers = config.count("kv_channels"), config.num_layers("num_layers")
    if head_dim % 4:
        raise UserError(
            f"config.json: kv_channels={head_dim} is not a multiple of 4, but rotary embedding turns pairs among its first half"
        )
    config.expect("num_hidden_layers", (None, layers), None)
    vocab_size = config.count("padded_vocab_size")
    config.expect("vocab_size", (None, vocab_size), None)
    return ChatGLM2Config(
        vocab_size=vocab_size,
        tie_word_embeddings=False,
        hidden_size=config.count("hidden_size"),
        ffn_hidden_size=config.count("ffn_hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layernorm_epsilon", 1e-5),
        add_qkv_bias=config.get("add_qkv_bias", bool, False),
        rotary=_read_rotary(config, head_dim // 2),
    )


def _read_rotary(config: ConfigReader, channels: int) -> RotaryConfig:
    """ChatGLM3-6B-32K and GLM-4 multiply the base by `rope_ratio`; ChatGLM2-6B-32K divides positions by it.

    Only `_name_or_path` distinguishes them.
    """
    ratio, length = config.positive("rope_ratio", 1.0), config.count("seq_length")
    if "chatglm2" in str(config.raw("_name_or_path")).lower():
        return RotaryConfig(channels, length, type="linear", factor=ratio)
    return RotaryConfig(channels, length, 10000.0 * ratio)


class SelfAttention(Module):
    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.query_key_value = Linear(c.hidden_size, sum(self.heads.fused) * c.head_dim, bias=c.add_qkv_bias)
        self.dense = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.query_key_value]

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        heads = self.query_key_value(x, batch).unflatten(-1, (-1, self.head_dim))  # [T, H + 2G, D]
        query, key, value = heads.split(self.heads.fused, dim=1)  # [T, H, D] and twice [T, G, D]
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots, interleaved=True)
        return self.dense(attend(query, cache, batch, self.head_dim**-0.5), batch)


class GLMMLP(FusedMLP):
    names = ("dense_h_to_4h", "dense_4h_to_h")


class GLMBlock(DecoderLayer):
    names = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")

    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__(c, SelfAttention(c), GLMMLP(c.hidden_size, c.ffn_hidden_size))


class ChatGLM2(PreNormLM):
    layout = ModelLayout(
        embedding="transformer.embedding.word_embeddings",
        layers="transformer.encoder.layers",
        final_norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
        attention="self_attention",
        scale_fold_targets={},
        row_parallel=("dense", "dense_4h_to_h"),
        units={
            "query_key_value": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD),
            "dense_h_to_4h": (Unit.CHANNEL, Unit.CHANNEL),
        },
    )

    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__(c, (GLMBlock(c) for _ in range(c.num_hidden_layers)), RotaryEmbedding(c.rotary))

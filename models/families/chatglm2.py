"""ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B in the layout of their own code, from config.json. ChatGLM-6B is in chatglm.py.

T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, V vocabulary, R output rows.
The first half of a head's channels is turned, in pairs of neighbours. Modules are named as the checkpoint's tensors are.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Rows
from models.batch import Batch, KVCache, LayerCache
from models.causal_lm import CausalLM, ModelShape
from models.config import ConfigReader
from models.decoder import DecoderLayer
from models.layers.attention import attend
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import FusedMLP
from models.layers.norm import AddRMSNorm, ResidualStream
from models.layers.rotary import Angles, RotaryConfig, RotaryEmbedding


@dataclass(frozen=True)
class ChatGLM2Config(ModelShape):
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    rms_norm_eps: float
    add_qkv_bias: bool
    seq_length: int
    rope_theta: float

    @property
    def context_length(self) -> int:
        return self.seq_length


def read_config(config: ConfigReader) -> ChatGLM2Config:
    """Raises UserError for a missing key, a wrong type, or a value that this file does not implement."""
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
        hidden_size=config.count("hidden_size"),
        ffn_hidden_size=config.count("ffn_hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layernorm_epsilon", 1e-5),
        add_qkv_bias=config.get("add_qkv_bias", bool, False),
        seq_length=config.count("seq_length"),
        rope_theta=10000.0 * _rope_ratio(config),
    )


def _rope_ratio(config: ConfigReader) -> float:
    """ChatGLM3-6B-32K and GLM-4 multiply the base of the angles by `rope_ratio`; ChatGLM2-6B-32K divides positions by it."""
    ratio, name = config.positive("rope_ratio", 1.0), str(config.raw("_name_or_path")).lower()
    if ratio != 1 and "chatglm2" in name:
        raise UserError(
            f"config.json: rope_ratio={ratio} is not supported for ChatGLM2 (_name_or_path={name!r}), which divides positions by it"
        )
    return ratio


class SelfAttention(nn.Module):
    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.split = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        self.query_key_value = Linear(c.hidden_size, sum(self.split) * c.head_dim, bias=c.add_qkv_bias)
        self.dense = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    @property
    def input_layers(self) -> tuple[nn.Module, ...]:
        return (self.query_key_value,)

    def forward(self, x: Rows, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, self.head_dim))  # [T, H + 2G, D]
        query, key, value = heads.split(self.split, dim=1)  # [T, H, D] and twice [T, G, D]
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots, interleaved=True)
        return self.dense(attend(query, cache, batch, self.head_dim**-0.5))  # type: ignore[no-any-return]


class GLMMLP(FusedMLP):
    names = ("dense_h_to_4h", "dense_4h_to_h")


class GLMBlock(DecoderLayer):
    names = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")

    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__(c, SelfAttention(c), GLMMLP(c.hidden_size, c.ffn_hidden_size))


class GLMTransformer(nn.Module):
    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GLMBlock(c) for _ in range(c.num_hidden_layers))
        self.final_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = RotaryEmbedding(RotaryConfig(c.head_dim // 2, c.seq_length, c.rope_theta))

    def forward(self, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        angles = self.rotary.angles(batch.positions, batch.prompt_lengths, x.dtype)  # [T, D/4] twice
        stream = ResidualStream(x)
        for layer, layer_batch, layer_cache in batch.by_layer(self.layers, cache):
            stream = layer(stream, angles, layer_batch, layer_cache)
        normed, _ = self.final_layernorm(*stream)  # [R, E]
        return normed  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__()
        self.word_embeddings = Embedding(c.vocab_size, c.hidden_size)


class Transformer(nn.Module):
    def __init__(self, c: ChatGLM2Config) -> None:
        super().__init__()
        self.embedding = Embeddings(c)
        self.encoder = GLMTransformer(c)
        self.output_layer = Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.encoder(self.embedding.word_embeddings(batch.token_ids), batch, cache)  # type: ignore[no-any-return]


class ChatGLM2(CausalLM):
    config: ChatGLM2Config
    row_parallel = ("dense", "dense_4h_to_h")
    attention = "self_attention"

    def __init__(self, config: ChatGLM2Config) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)

    @property
    def head(self) -> nn.Module:
        return self.transformer.output_layer

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.transformer(batch, cache)  # type: ignore[no-any-return]

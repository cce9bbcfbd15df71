"""TeleChat and TeleChat2: Llama with a fused key and value projection (arXiv 2401.03804, 2507.18013).

T tokens, H query heads, G key/value heads, D channels per head. Module names match the checkpoint's tensor names.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM
from models.layers.attention import Heads, attend
from models.layers.linear import Linear, MergedLinear
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.rotary import Angles, RotaryConfig
from models.layout import ModelLayout, Unit

ROPE_THETA = 10000.0
BASE_SEQLEN = 4096  # from the code of TeleChat; its files do not contain it


def read_config(config: ConfigReader) -> DecoderConfig:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    for key in ("apply_residual_connection_post_layernorm", "embed_layernorm", "logn", "semi_causal"):
        config.expect(key, (False, None), False)
    config.expect("n_inner", (None,), None)
    for key in ("flash_attn", "seq_length"):
        config.raw(key)  # a choice of two equivalent implementations, and a length that the original code does not read
    hidden_size, heads = config.count("hidden_size"), config.count("n_head")
    groups = config.count("num_key_value_heads", heads)
    config.check_multiple("n_head", heads, "num_key_value_heads", groups)
    config.check_multiple("hidden_size", hidden_size, "2 * n_head", 2 * heads)
    head_dim = hidden_size // heads
    return DecoderConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("ffn_hidden_size"),
        num_hidden_layers=config.num_layers("n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=_read_rotary(config, head_dim),
    )


def _read_rotary(config: ConfigReader, head_dim: int) -> RotaryConfig:
    """Read the rotary settings.

    The base grows by alpha: 1 up to base_seqlen, 3 up to twice base_seqlen, 7 up to four times.
    The original code uses the training length for every text up to this length. For a longer text it would rotate all
    keys again, so the training length is the context length here.
    """
    training, base = config.count("training_seqlen", 8192), config.count("base_seqlen", BASE_SEQLEN)
    alpha = max(1, 2 ** math.ceil(math.log2(training / base) + 1) - 1)
    if alpha > 1 and head_dim == 2:
        raise UserError(
            "config.json: training_seqlen above base_seqlen needs more than 2 channels of hidden_size a head"
        )
    theta = ROPE_THETA * alpha ** (head_dim / (head_dim - 2)) if alpha > 1 else ROPE_THETA
    return RotaryConfig(head_dim, training, theta)


class Attention(Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.head_dim = c.head_dim
        query = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        key_value = Linear(c.hidden_size, 2 * c.num_key_value_heads * c.head_dim, bias=False)
        self.qkv = MergedLinear(self, {"query": query, "key_value": key_value})
        self.dense = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return self.qkv.layers

    def fuse(self) -> None:
        self.qkv.merge()

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        queries, fused = self.qkv(x, batch)
        query = queries.unflatten(-1, (-1, self.head_dim))  # [T, H, D]
        key, value = fused.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)  # [T, G, D] each
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        return self.dense(attend(query, cache, batch, self.head_dim**-0.5), batch)


class TeleChatLayer(DecoderLayer):
    names = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")


class TeleChat(DecoderLM):
    layout = ModelLayout(
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="self_attention",
        scale_fold_targets={"down_proj": "up_proj"},
        row_parallel=("dense", "down_proj"),
        units={"query": (Unit.QUERY_HEAD,), "key_value": (Unit.KEY_VALUE_HEAD,)},
    )

    def __init__(self, c: DecoderConfig) -> None:
        layers = (
            TeleChatLayer(c, Attention(c), MLP(c.hidden_size, c.intermediate_size, down_bias=True))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers)

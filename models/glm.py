"""GLM-4-9B in the layout of transformers, from config.json. That of its own code is in chatglm2.py.

T tokens, H query heads, G key/value heads, D channels per head, E hidden channels, F feed-forward channels.
The first channels of a head are turned, half of them by default, in pairs of neighbours. Modules are named as the checkpoint's tensors are.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.swiglu import swiglu
from models.batch import Batch, LayerCache
from models.config import ConfigReader
from models.decoder import DecoderConfig, DecoderLayer, DecoderLM
from models.layers.attention import attend
from models.layers.linear import Linear, linear_together
from models.layers.rotary import read_rotary_config


@dataclass(frozen=True)
class GlmConfig(DecoderConfig):
    attention_bias: bool


def read_config(config: ConfigReader) -> GlmConfig:
    """Raises UserError for a missing key, a wrong type, or a value that this file does not implement. Defaults are transformers'."""
    config.expect("hidden_act", ("silu",), "silu")
    heads = config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", 2)
    if heads % groups:
        raise UserError(f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    head_dim = config.count("head_dim", 128)
    return GlmConfig(
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1.5625e-7),
        attention_bias=config.get("attention_bias", bool, True),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=read_rotary_config(
            config, head_dim, config.count("max_position_embeddings", 131072), partial_rotary_factor=0.5
        ),
    )


class Attention(nn.Module):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        projected = linear_together(x, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)  # [T, H, D], [T, G, D] twice
        query = rope_and_store(query, key, value, cos, sin, *cache, batch.slots, interleaved=True)
        return self.o_proj(attend(query, cache, batch, self.head_dim**-0.5))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # [T, F] each
        return self.down_proj(swiglu(gate, up))  # type: ignore[no-any-return]


class Glm(DecoderLM):
    def __init__(self, c: GlmConfig) -> None:
        super().__init__(c, (DecoderLayer(c, Attention(c), MLP(c)) for _ in range(c.num_hidden_layers)))

"""BitNet b1.58 (arXiv 2402.17764, 2504.12285): Llama with a norm before each output projection. The gate is squared ReLU,
or silu in the first models. `quantization/layouts/bitnet.py` reads ternary weights.

T tokens, R output rows, E hidden channels, H heads, D channels per head.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.quantize_rows import Activations
from kernels.swiglu import swiglu
from models import decoder
from models.batch import Batch
from models.config import ConfigReader
from models.decoder import DecoderLayer, DecoderLM, read_decoder_config
from models.families.llama import LlamaConfig
from models.layers import mlp
from models.layers.linear import Linear
from models.layers.mlp import squared_relu
from models.layers.norm import RMSNorm
from models.layers.tensor_parallel import ShardedChannels
from models.layout import ModelLayout

SQUARED_RELU, SILU = "relu2", "silu"


@dataclass(frozen=True)
class BitNetConfig(LlamaConfig):
    hidden_act: str


def read_config(config: ConfigReader) -> BitNetConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    activations = (SQUARED_RELU, SILU)
    return BitNetConfig(
        **vars(read_decoder_config(config, 1e-5, 2048, activations=activations, theta=5e5)),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=False,
        hidden_act=config.activation(activations, SQUARED_RELU),
    )


class Attention(decoder.Attention):
    rank_inputs: ShardedChannels | None = None
    """The output projection's inputs on the ranks, which the norm needs whole."""

    def __init__(self, c: BitNetConfig) -> None:
        super().__init__(c, None, c.attention_bias, c.attention_bias)
        self.attn_sub_norm = RMSNorm(c.num_attention_heads * c.head_dim, c.rms_norm_eps)

    def project(self, attended: Tensor, batch: Batch) -> Tensor:
        """Return the output [R, E] of the attended values [R, H * D]."""
        if self.rank_inputs is not None:
            attended = self.rank_inputs.gather(attended)
        normed: Tensor = self.attn_sub_norm(attended)
        return super().project(normed, batch)


class MLP(mlp.MLP):
    rank_inputs: ShardedChannels | None = None
    """As of `Attention`."""

    def __init__(self, c: BitNetConfig) -> None:
        super().__init__(c.hidden_size, c.intermediate_size)
        self.is_silu = c.hidden_act == SILU
        self.ffn_sub_norm = RMSNorm(c.intermediate_size, c.rms_norm_eps)

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        gate, up = self.gate_up(x, batch)
        inner = swiglu(gate, up) if self.is_silu else squared_relu(gate) * up
        if self.rank_inputs is not None:
            inner = self.rank_inputs.gather(inner)
        down: Linear = self.parts[-1]
        return down(self.ffn_sub_norm(inner), batch)


class BitNet(DecoderLM):
    layout = ModelLayout(scale_fold_targets={})

    def __init__(self, c: BitNetConfig) -> None:
        super().__init__(c, (DecoderLayer(c, Attention(c), MLP(c)) for _ in range(c.num_hidden_layers)))

"""GPT-J (EleutherAI): attention and feed-forward in parallel, after one LayerNorm.

The first channels of a head are rotated, in pairs of adjacent channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import DecoderConfig, InterleavedRopeAttention
from models.families.gpt2 import read_shape
from models.layer_norm_decoder import ParallelLayer, RotaryLayerNormLM
from models.layers.mlp import GELUS, UngatedMLP
from models.layers.norm import LayerNorm
from models.layers.rotary import RotaryConfig
from models.layout import ModelLayout


@dataclass(frozen=True)
class GPTJConfig(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    activation_function: str


def read_config(config: ConfigReader) -> GPTJConfig:
    """Read config.json, with defaults as in transformers. Raises UserError for mistyped or unsupported values."""
    for key in ("rotary", "scale_attn_weights"):  # of the first files; transformers does not read them
        config.expect(key, (None, True), None)
    context_length = config.count("n_positions", 2048)
    shape = dict(vars(read_shape(config)))
    del shape["max_position_embeddings"]
    head_dim = shape["head_dim"]
    channels = config.count("rotary_dim", 64)
    if channels > head_dim or channels % 2:
        raise UserError(
            f"config.json: rotary_dim={channels} is not an even number of the {head_dim} channels of a head"
        )
    tied = config.get("tie_word_embeddings", bool, False)
    rotary = RotaryConfig(channels, context_length)
    return GPTJConfig(**shape | {"tie_word_embeddings": tied}, rotary=rotary)


class Attention(InterleavedRopeAttention):
    output_name = "out_proj"


class MLP(UngatedMLP):
    names = ("fc_in", "fc_out")


class Block(ParallelLayer):
    names = ("ln_1", "attn", "mlp")


class GPTJLM(RotaryLayerNormLM):
    """The model of GPT-J and CodeGen."""

    layout = ModelLayout(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="attn",
        norms=("ln_1",),
        scale_fold_targets={},
        row_parallel=("out_proj", "fc_out"),
    )

    def __init__(self, c: GPTJConfig, attentions: Iterable[nn.Module]) -> None:
        activation = GELUS[c.activation_function]
        layers = (
            Block(_norm(c), attention, MLP(c.hidden_size, c.intermediate_size, True, activation))
            for attention in attentions
        )
        super().__init__(c, layers, _norm(c), head_bias=True)


def _norm(c: GPTJConfig) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps)


class GPTJ(GPTJLM):
    def __init__(self, c: GPTJConfig) -> None:
        super().__init__(c, (Attention(c) for _ in range(c.num_hidden_layers)))

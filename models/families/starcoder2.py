"""StarCoder 2 (arXiv 2402.19173): grouped-query rotary attention, LayerNorms with bias, a feed-forward without gate."""

from dataclasses import dataclass, replace

from kernels.gelu import gelu_tanh
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, read_decoder_config
from models.layer_norm_decoder import RotaryLayerNormLM, SequentialLayer
from models.layers.mlp import UngatedMLP
from models.layers.norm import LayerNorm
from models.layers.sliding_window import read_window
from models.layout import ModelLayout

UNUSED = (
    "activation_function",
    "layer_norm_epsilon",
    "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
    "embedding_dropout",
    "residual_dropout",
)
"""Keys of the hub's files without effect. Other keys replace the first two, and the last two are training settings."""


@dataclass(frozen=True)
class Starcoder2Config(DecoderConfig):
    """`rms_norm_eps` is the epsilon of the LayerNorms."""

    use_bias: bool
    sliding_window: int | None

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, has_windows=self.sliding_window is not None)


def read_config(config: ConfigReader) -> Starcoder2Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    for key in UNUSED:
        config.raw(key)
    config.expect("mlp_type", (None, "default"), None)
    config.expect("norm_type", (None, "layer_norm"), None)
    shape = read_decoder_config(
        config, rms_norm_eps=1e-5, max_position_embeddings=4096, activations=("gelu_pytorch_tanh",)
    )
    return Starcoder2Config(
        **vars(shape)
        | {
            "rms_norm_eps": config.positive("norm_epsilon", 1e-5),
            "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
        },
        use_bias=config.get("use_bias", bool, True),
        sliding_window=read_window(config),
    )


class MLP(UngatedMLP):
    names = ("c_fc", "c_proj")


class Starcoder2(RotaryLayerNormLM):
    layout = ModelLayout(
        scale_fold_targets={"o_proj": "v_proj"},
        row_parallel=("o_proj", "c_proj"),
    )

    def __init__(self, c: Starcoder2Config) -> None:
        layers = (
            SequentialLayer(
                (_norm(c), _norm(c)),
                Attention(c, c.sliding_window, c.use_bias, c.use_bias),
                MLP(c.hidden_size, c.intermediate_size, c.use_bias, gelu_tanh),
            )
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, _norm(c))


def _norm(c: Starcoder2Config) -> LayerNorm:
    return LayerNorm(c.hidden_size, c.rms_norm_eps)

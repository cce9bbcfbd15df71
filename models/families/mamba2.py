"""Mamba-2 (arXiv 2405.21060): all layers are recurrent, so the model keeps no keys and values."""

from dataclasses import dataclass, replace

from conf.errors import UserError
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import MixerLayer, PreNormLM, PreNormShape
from models.layers.mamba2 import Mamba2, Mamba2Config, read_heads_mamba2
from models.layout import ModelLayout

MOST_TOKENS = 2**20
"""The context length. The model has no limit; llama.cpp's converter writes this number."""
OF_TRAINING = """
chunk_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min time_step_rank
""".split()
"""Keys of training and of other implementations. The residual stream has the model's dtype."""


@dataclass(frozen=True)
class Mamba2LMConfig(PreNormShape):
    mamba: Mamba2Config

    @property
    def context_length(self) -> int:
        return MOST_TOKENS

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, is_recurrent=True)

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        return (True,) * self.num_hidden_layers


def read_config(config: ConfigReader) -> Mamba2LMConfig:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values, and for sizes that contradict each other.
    """
    config.activation(("silu",), "silu")
    for key in OF_TRAINING:
        config.raw(key)
    hidden_size, eps = config.count("hidden_size", 4096), config.positive("layer_norm_epsilon", 1e-5)
    mamba = read_heads_mamba2(config, "", "state_size", eps)
    heads = mamba.heads
    if heads.size != (size := config.count("expand", 2) * hidden_size):
        problem = f"config.json: num_heads={heads.num_heads} of head_dim={heads.head_channels} channels"
        raise UserError(f"{problem} are not the {size} channels of expand * hidden_size")
    return Mamba2LMConfig(
        vocab_size=config.count("vocab_size", 32768),
        num_hidden_layers=config.num_layers(),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        hidden_size=hidden_size,
        rms_norm_eps=eps,
        mamba=mamba,
    )


class Mamba2LM(PreNormLM):
    layout = ModelLayout(
        embedding="backbone.embeddings",
        layers="backbone.layers",
        final_norm="backbone.norm_f",
        recurrent="mixer",
        norms=("norm",),
        scale_fold_targets={},
        row_parallel=("out_proj",),
    )
    float32_tensors = ("A_log", "dt_bias", "mixer.D")

    def __init__(self, c: Mamba2LMConfig) -> None:
        layers = (MixerLayer(c, Mamba2(c.hidden_size, c.mamba)) for _ in range(c.num_hidden_layers))
        super().__init__(c, layers, None)

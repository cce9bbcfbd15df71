"""SmolLM3: Llama without rotation of queries and keys in some layers, by default every fourth."""

from dataclasses import dataclass

from conf.errors import UserError
from models.config import ConfigReader
from models.decoder import Attention, DecoderLayer, DecoderLM, NoPEAttention, WindowedConfig
from models.families import llama
from models.families.llama import LlamaConfig
from models.layers.mlp import MLP
from models.layers.sliding_window import read_named_windows


@dataclass(frozen=True)
class SmolLM3Config(LlamaConfig, WindowedConfig):
    turns: tuple[bool, ...]
    """For each layer, whether it rotates queries and keys."""


def read_config(config: ConfigReader) -> SmolLM3Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    scaling = config.section("rope_parameters")
    if scaling is None or scaling.raw("rope_theta") is None:
        config.positive("rope_theta")  # transformers defaults to 2 million
    shape = llama.read_config(config)
    return SmolLM3Config(
        **{**vars(shape), "tie_word_embeddings": config.get("tie_word_embeddings", bool, True)},
        turns=read_turns(config, shape.num_hidden_layers),
        windows=read_named_windows(config, shape.num_hidden_layers),
    )


def read_turns(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer rotates queries and keys.

    `no_rope_layers` holds 1 for a layer with rotation. Without it, or if it is empty, every
    `no_rope_layer_interval`th layer has no rotation.
    """
    interval = config.count("no_rope_layer_interval", 4)
    turns = config.raw("no_rope_layers")
    if turns is None or turns == []:
        return tuple(i % interval != 0 for i in range(1, num_layers + 1))
    if not isinstance(turns, list) or len(turns) != num_layers or any(flag not in (0, 1) for flag in turns):
        raise UserError(f"config.json: no_rope_layers={turns!r} is not {num_layers} times 0 or 1")
    return tuple(map(bool, turns))


class SmolLM3(DecoderLM):
    def __init__(self, c: SmolLM3Config) -> None:
        layers = (
            DecoderLayer(
                c,
                (Attention if turns else NoPEAttention)(c, window, c.attention_bias, c.attention_bias),
                MLP(c.hidden_size, c.intermediate_size, c.mlp_bias),
            )
            for turns, window in zip(c.turns, c.windows, strict=True)
        )
        super().__init__(c, layers)

"""The config.json keys of a decoder with rotary attention, from the metadata of a GGUF file."""

from typing import Any

from models.families.gemma2 import FULL, SLIDING
from models.formats.gguf.header import GGUFMetadata
from models.formats.gguf.rotary import rope_scaling

SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
# Number of layers of the 27B models. Their attention scale comes from hidden_size / heads instead of head_dim.
GEMMA_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
YARN_LOG = 0.1  # the converter's factor of mscale_all_dim
TEMPERATURE = "attention.temperature_scale"
WINDOW, WINDOW_PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def has_bias(file: GGUFMetadata, module: str) -> bool:
    return f"blk.0.{module}.bias" in file.tensors


def decoder_shape(
    file: GGUFMetadata, inner_size: int | None = None, epsilon: str = "attention.layer_norm_rms_epsilon"
) -> dict[str, Any]:
    """Return the keys of a decoder with rotary attention, except partial_rotary_factor.

    `inner_size`: the default of files without feed_forward_length, whose layers are all mixtures. `epsilon`: the file's
    key of the norms' epsilon.
    """
    read = file.read
    heads, hidden_size = read.count("attention.head_count"), read.count("embedding_length")
    head_dim = read.count("attention.key_length", max(hidden_size // heads, 1))
    read.expect("attention.value_length", (head_dim,), head_dim)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": read.count("feed_forward_length", inner_size),
        "num_hidden_layers": read.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": read.positive(epsilon),
        "max_position_embeddings": read.count("context_length"),
        "rope_theta": read.positive("rope.freq_base", 10000.0),
    }


def rotary_decoder(file: GGUFMetadata, inner_size: int | None = None) -> dict[str, Any]:
    """Return the keys of a decoder whose rotary embedding covers the whole head. `inner_size`: as for `decoder_shape`."""
    shape = decoder_shape(file, inner_size)
    file.read.expect("rope.dimension_count", (shape["head_dim"],), shape["head_dim"])
    file.read.expect("rope.scaling.yarn_log_multiplier", (None, 0.0), None)
    return shape | {"rope_scaling": rope_scaling(file, shape["head_dim"])}


def layer_types(file: GGUFMetadata, architecture: str, num_layers: int) -> list[str] | None:
    """Return the type of each layer. None: the file has no pattern."""
    key = f"{architecture}.{WINDOW_PATTERN}"
    if key not in file.header.arrays:
        return None
    return [SLIDING if slides else FULL for slides in file.header.numbers(key, "b", num_layers)]

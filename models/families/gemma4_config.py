"""The config of Gemma 4: heads per layer, shared keys and values, inputs per layer, mixtures."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from models.config import ConfigReader
from models.families.gemma2 import FULL, SLIDING, layer_windows, read_soft_cap
from models.families.gemma3 import Gemma3Config
from models.layers.moe import MixtureConfig
from models.layers.rotary import RotaryConfig, read_rotary_by_layer


@dataclass(frozen=True)
class LayerInputs:
    """The table of vectors per token and layer (per-layer embeddings)."""

    vocab_size: int
    channels: int
    """Of a layer."""


@dataclass(frozen=True)
class Gemma4Config(Gemma3Config):
    layer_heads: tuple[tuple[int, int], ...]
    """For each layer, the number of key heads, and the channels of a head."""
    keys_are_values: bool
    """Whether full-attention layers have no value projection: a value is the projected key before its norm."""
    num_sharing: int
    """The number of last layers that read keys and values of earlier layers."""
    has_wide_mlps: bool
    """Whether the feed-forward layers of the last `num_sharing` layers have twice the channels."""
    layer_inputs: LayerInputs | None
    mixture: MixtureConfig | None

    @property
    def first_sharing(self) -> int:
        return len(self.windows) - self.num_sharing

    @property
    def shared_caches(self) -> Mapping[int, int]:
        sources = {window is None: number for number, window in enumerate(self.windows[: self.first_sharing])}
        sharing = range(self.first_sharing, self.num_hidden_layers)
        return {number: sources[self.windows[number] is None] for number in sharing}

    @property
    def layer_kinds(self) -> tuple[Hashable, ...]:
        numbers = range(self.num_hidden_layers)
        return tuple((self.windows[i] is None, self.layer_heads[i], i >= self.first_sharing) for i in numbers)


def read_unified_config(config: ConfigReader) -> Gemma4Config:
    """Read config.json of Gemma 4 Unified, as `read_config` does."""
    return read_config(config, window=1024, max_position_embeddings=262144, has_inputs=False)


def read_config(
    config: ConfigReader, window: int = 512, max_position_embeddings: int = 131072, has_inputs: bool = True
) -> Gemma4Config:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values.

    `window`, `max_position_embeddings`: the defaults. `has_inputs`: whether layers may have inputs of their own.
    """
    config.raw("hidden_act")  # a copy of hidden_activation
    config.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config.expect("use_bidirectional_attention", (None, False, "vision"), None)  # "vision" is causal for text
    windows = read_windows(config, window)
    keys_are_values = config.get("attention_k_eq_v", bool, False)
    heads = config.count("num_attention_heads", 8)
    layer_heads = read_heads(config, windows, keys_are_values)
    for groups, _ in layer_heads:
        config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    full_rotary, sliding_rotary = _read_rotary(config, windows, layer_heads, max_position_embeddings)
    return Gemma4Config(
        vocab_size=config.count("vocab_size", 262144),
        hidden_size=config.count("hidden_size", 2304),
        intermediate_size=config.count("intermediate_size", 9216),
        num_hidden_layers=len(windows),
        num_attention_heads=heads,
        num_key_value_heads=layer_heads[0][0],
        head_dim=layer_heads[0][1],
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        attention_bias=config.get("attention_bias", bool, False),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=read_soft_cap(config, "final_logit_softcapping", None),
        windows=windows,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        rotary=full_rotary,
        sliding_rotary=sliding_rotary,
        layer_heads=layer_heads,
        keys_are_values=keys_are_values,
        num_sharing=read_num_sharing(config, windows),
        has_wide_mlps=config.get("use_double_wide_mlp", bool, False),
        layer_inputs=read_layer_inputs(config) if has_inputs else None,
        mixture=_read_mixture(config, len(windows)),
    )


def read_windows(config: ConfigReader, length: int) -> tuple[int | None, ...]:
    """Return the window of each layer. The last layer has full attention, whatever its type in the file is."""
    types = [SLIDING if i % 6 else FULL for i in range(1, config.num_layers() + 1)]
    types[-1] = FULL
    return (*layer_windows(config, types, length)[:-1], None)


def read_num_sharing(config: ConfigReader, windows: tuple[int | None, ...], default: int = 0) -> int:
    """Return `num_kv_shared_layers`. Raises UserError if a type of layer has no keys and values of its own."""
    num_sharing = config.get("num_kv_shared_layers", int, default)
    own = windows[: max(0, len(windows) - num_sharing)]
    if num_sharing < 0 or {window is None for window in own} != {window is None for window in windows}:
        raise UserError(
            f"config.json: num_kv_shared_layers={num_sharing} is not from 0 to a number that leaves one layer of each "
            f"type in layer_types keys and values, of {len(windows)} layers"
        )
    return num_sharing


def read_heads(
    config: ConfigReader, windows: tuple[int | None, ...], keys_are_values: bool
) -> tuple[tuple[int, int], ...]:
    """Return the number of key heads and the channels of a head for each layer.

    transformers 5 writes `per_layer_config`, which replaces the keys of full-attention layers. Raises UserError for
    other settings per layer.
    """
    sliding = config.count("num_key_value_heads", 4), config.count("head_dim", 256)
    groups = config.raw("num_global_key_value_heads")
    full = config.count("num_global_key_value_heads") if groups and keys_are_values else sliding[0]
    full_heads = full, config.count("global_head_dim", 512)
    by_layer = config.raw("per_layer_config")
    if by_layer is None:
        return _checked(tuple(full_heads if window is None else sliding for window in windows))
    if not isinstance(by_layer, dict):
        raise UserError(f"config.json: per_layer_config={by_layer!r} is not an object of settings by layer")
    heads = [sliding] * len(windows)
    for number, settings in by_layer.items():
        is_layer = number.isdecimal() and int(number) < len(windows)  # transformers pads numbers: "04"
        if not is_layer or not isinstance(settings, dict):
            raise UserError(f"config.json: per_layer_config: {number!r} is not the settings of a layer")
        layer = ConfigReader(settings, f"config.json: per_layer_config: {number}")
        heads[int(number)] = layer.count("num_key_value_heads", sliding[0]), layer.count("head_dim", sliding[1])
        if unknown := layer.unread():
            raise UserError(f"config.json: per_layer_config: {number} has {', '.join(unknown)}, which is not supported")
    return _checked(tuple(heads))


def _checked(layer_heads: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for _, head_dim in layer_heads:
        if head_dim % 2:
            raise UserError(f"config.json: head_dim={head_dim} is odd, but rotary embedding turns pairs of channels")
    return layer_heads


def _read_rotary(
    config: ConfigReader,
    windows: tuple[int | None, ...],
    layer_heads: tuple[tuple[int, int], ...],
    max_position_embeddings: int,
) -> tuple[RotaryConfig, RotaryConfig]:
    """Return the rotary settings of full-attention and of sliding-window layers."""
    full, sliding = (
        {head_dim for (_, head_dim), window in zip(layer_heads, windows, strict=True) if (window is None) == is_full}
        for is_full in (True, False)
    )
    if len(full) > 1 or len(sliding) > 1:
        raise UserError("config.json: per_layer_config gives layers of one type different values of head_dim")
    (full_dim,), length = full, config.count("max_position_embeddings", max_position_embeddings)
    sliding_dim = next(iter(sliding), full_dim)
    return read_rotary_by_layer(config, full_dim, length, 1e6, 1e4, sliding_dim, full_share=0.25)


def read_layer_inputs(config: ConfigReader) -> LayerInputs | None:
    channels, vocab_size = config.get("hidden_size_per_layer_input", int, 256), config.raw("vocab_size_per_layer_input")
    if config.raw("hidden_size_per_layer_input", 256) in (0, None):
        return None
    if vocab_size is None:
        vocab_size = 262144
    if isinstance(vocab_size, int) and vocab_size < config.count("vocab_size", 262144):
        raise UserError(f"config.json: vocab_size_per_layer_input={vocab_size} is less than vocab_size")
    sizes: dict[str, Any] = {"hidden_size_per_layer_input": channels, "vocab_size_per_layer_input": vocab_size}
    reader = ConfigReader(sizes, "config.json")
    return LayerInputs(reader.count("vocab_size_per_layer_input"), reader.count("hidden_size_per_layer_input"))


def _read_mixture(config: ConfigReader, num_layers: int) -> MixtureConfig | None:
    if not config.get("enable_moe_block", bool, False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            config.raw(key)
        return None
    experts, chosen = config.count("num_experts"), config.count("top_k_experts")
    if chosen > experts:
        raise UserError(f"config.json: top_k_experts={chosen} is more than num_experts={experts}")
    return MixtureConfig(experts, chosen, config.count("moe_intermediate_size"), True, (True,) * num_layers)

"""The config of Gemma 3n: Gemma 4's, with streams, sizes per layer and sparse gates."""

from collections.abc import Hashable
from dataclasses import dataclass

from conf.errors import UserError
from models.config import ConfigReader
from models.families.gemma2 import FULL, SLIDING, layer_windows, read_soft_cap
from models.families.gemma4_config import Gemma4Config, LayerInputs, read_num_sharing
from models.layers.rotary import read_rotary_by_layer

MOST_STREAMS = 8


@dataclass(frozen=True)
class Gemma3nConfig(Gemma4Config):
    num_streams: int
    active: int
    """The number of the stream that attention and feed-forward read."""
    scales_active: bool
    """Whether the active stream is multiplied by a weight before the layer's own input is added."""
    laurel_rank: int
    inner_sizes: tuple[int, ...]
    """The feed-forward channels of each layer."""
    sparsity: tuple[float, ...]
    """For each layer, the share of a normal distribution that the gate sets to 0; 0: none."""

    @property
    def layer_kinds(self) -> tuple[Hashable, ...]:
        numbers = range(self.num_hidden_layers)
        return tuple((self.windows[i] is None, self.inner_sizes[i], i >= self.first_sharing) for i in numbers)


def read_config(config: ConfigReader) -> Gemma3nConfig:
    """Read config.json with transformers' defaults. Raises UserError for missing, mistyped or unsupported values."""
    for key in ("hidden_act", "altup_coef_clip"):  # a copy of hidden_activation, and a setting of training
        config.raw(key)
    config.expect("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    num_layers, heads = config.num_layers(), config.count("num_attention_heads", 8)
    groups, head_dim = _read_heads(config, heads)
    types = [SLIDING if i % 5 else FULL for i in range(1, num_layers + 1)]
    windows = layer_windows(config, types, 512)
    rotary, sliding_rotary = read_rotary_by_layer(
        config, head_dim, config.count("max_position_embeddings", 32768), theta=1e6, sliding_theta=1e4
    )
    streams, active = _read_streams(config)
    inner_sizes = _by_layer(config, "intermediate_size", 16384, num_layers)
    return Gemma3nConfig(
        vocab_size=config.count("vocab_size", 262400),
        hidden_size=config.count("hidden_size", 2048),
        intermediate_size=inner_sizes[0],
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        attention_bias=config.get("attention_bias", bool, False),
        query_pre_attn_scalar=1.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=read_soft_cap(config, "final_logit_softcapping", 30.0),
        windows=windows,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        rotary=rotary,
        sliding_rotary=sliding_rotary,
        layer_heads=((groups, head_dim),) * num_layers,
        keys_are_values=False,
        num_sharing=read_num_sharing(config, windows, default=15),
        has_wide_mlps=False,
        layer_inputs=LayerInputs(
            config.count("vocab_size_per_layer_input", 262144), config.count("hidden_size_per_layer_input", 256)
        ),
        mixture=None,
        num_streams=streams,
        active=active,
        scales_active=config.get("altup_correct_scale", bool, True),
        laurel_rank=config.count("laurel_rank", 64),
        inner_sizes=inner_sizes,
        sparsity=_read_sparsity(config, num_layers),
    )


def _read_heads(config: ConfigReader, num_heads: int) -> tuple[int, int]:
    """Return the number of key heads and the channels of a head."""
    groups, head_dim = config.count("num_key_value_heads", 2), config.count("head_dim", 256)
    config.check_multiple("num_attention_heads", num_heads, "num_key_value_heads", groups)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim={head_dim} is odd, but rotary embedding turns pairs of channels")
    return groups, head_dim


def _read_streams(config: ConfigReader) -> tuple[int, int]:
    """Return the number of streams, and of the active one."""
    streams, active = config.count("altup_num_inputs", 4), config.get("altup_active_idx", int, 0)
    if streams > MOST_STREAMS or not 0 <= active < streams:
        problem = f"altup_num_inputs={streams} and altup_active_idx={active} are not"
        raise UserError(f"config.json: {problem} at most {MOST_STREAMS} streams and the number of one of them")
    return streams, active


def _by_layer(config: ConfigReader, key: str, default: int, num_layers: int) -> tuple[int, ...]:
    """Return a size for each layer, from a number for all layers or from a list."""
    values = config.raw(key, default)
    if not isinstance(values, list):
        return (config.count(key, default),) * num_layers
    if len(values) != num_layers:
        raise UserError(f"config.json: {key}={values!r} is not a list of num_hidden_layers={num_layers} numbers")
    return tuple(ConfigReader({key: value}, "config.json").count(key) for value in values)


def _read_sparsity(config: ConfigReader, num_layers: int) -> tuple[float, ...]:
    sparse = 10 if num_layers > 10 else 0
    values = config.raw("activation_sparsity_pattern")
    if values is None:
        return (0.95,) * sparse + (0.0,) * (num_layers - sparse)
    is_list = isinstance(values, list) and len(values) == num_layers
    if not is_list or not all(type(value) in (int, float) and 0 <= value < 1 for value in values):
        problem = f"activation_sparsity_pattern={values!r:.80} is not a list of {num_layers} numbers"
        raise UserError(f"config.json: {problem} from 0 to below 1")
    return tuple(map(float, values))

"""The angles of rotary position embedding, with the scalings for long contexts.

T tokens, D channels per head. Frequencies are float32, computed in the order of operations of the models' own code.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.rope import rope_angles
from models.config import ConfigReader
from models.layers.constant import Constant

Angles: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin of the rotation angles of each token's channel pairs, [T, D/2] each."""


TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
"""Besides `proportional`, which has other settings."""
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Settings without effect on text: the three positions of a text token are equal, so all sections rotate alike."""


class AnglesByLayer(NamedTuple):
    """The angles of a model whose sliding-window layers use other frequencies than its full-attention layers."""

    full: Angles
    sliding: Angles

    def of(self, window: int | None) -> Angles:
        """Return the angles of a layer with this window. None: full attention."""
        return self.full if window is None else self.sliding


@dataclass(frozen=True)
class RotaryConfig:
    """The checked `rope_theta` and `rope_scaling` of config.json (`rope_parameters` in transformers 5)."""

    head_dim: int
    max_position_embeddings: int
    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_length: int = 0  # context length before scaling (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    mscale_all_dim: float = 0.0  # yarn in DeepSeek: also scales the attention logits
    share: float = 1.0  # proportional: the share of the channel pairs that rotate

    @property
    def context_length(self) -> int:
        """The context length after scaling.

        linear and dynamic scale max_position_embeddings; for all other types it is already the scaled length.
        """
        if self.type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        return max(self.max_position_embeddings, int(self.original_length * self.factor) if self.type == "yarn" else 0)


def read_rotary_config(
    config: ConfigReader,
    head_dim: int,
    max_position_embeddings: int,
    partial_rotary_factor: float | None = None,
    default_theta: float = 10000.0,
) -> RotaryConfig:
    """Read the rotary settings of config.json. Supported scalings are linear, dynamic, llama3 and yarn.

    partial_rotary_factor: the default share of a head's channels that are rotated; None: always all channels.
    default_theta: the default base of the frequencies.
    Raises UserError for an unsupported scaling or setting.
    """
    theta = config.positive("rope_theta", default_theta)
    _refuse_both(config)
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    if partial_rotary_factor is not None:
        head_dim = _turning_channels(config, scaling, head_dim, partial_rotary_factor)
    if scaling is None:
        return RotaryConfig(head_dim, max_position_embeddings, theta)
    theta = scaling.positive("rope_theta", theta)
    if scaling.raw("rope_type") == "proportional":
        return _read_proportional(scaling, head_dim, max_position_embeddings, theta)
    if partial_rotary_factor is None:
        scaling.expect("partial_rotary_factor", (None, 1), None)
    is_old = scaling.raw("type") is not None and scaling.raw("rope_type") is None  # older files use the key type
    kind = scaling.expect("type" if is_old else "rope_type", TYPES, "default")
    fields: dict[str, Any] = {}
    original = _original_length(config, scaling, max_position_embeddings)
    if kind == "default":
        scaling.expect("factor", (None, 1), None)
    else:
        implied = max_position_embeddings / original if kind == "yarn" and scaling.raw("factor") is None else None
        fields = {"factor": implied or scaling.positive("factor"), "original_length": original}
        if fields["factor"] < 1:
            raise UserError(f"config.json: rope_scaling: factor={fields['factor']} is less than 1")
    if kind == "llama3":
        low, high = (scaling.positive(name) for name in ("low_freq_factor", "high_freq_factor"))
        if low > high:
            raise UserError(f"config.json: rope_scaling: low_freq_factor={low} is above high_freq_factor={high}")
        fields |= {"low_freq_factor": low, "high_freq_factor": high}
    elif kind == "yarn":
        fields |= _read_yarn(scaling, fields["factor"])
        if theta == 1:
            raise UserError("config.json: rope_theta=1.0 leaves yarn no wavelengths to choose from")
    elif kind == "dynamic" and head_dim == 2:
        raise UserError("config.json: dynamic rope_scaling needs a head_dim above 2")
    if unknown := [key for key in scaling.unread() if key not in MULTIMODAL]:
        raise UserError(f"config.json: rope_scaling has fields that are not supported: {', '.join(unknown)}")
    return RotaryConfig(head_dim, max_position_embeddings, theta, kind, **fields)


def read_rotary_by_layer(
    config: ConfigReader,
    head_dim: int,
    max_position_embeddings: int,
    theta: float,
    sliding_theta: float,
    sliding_head_dim: int | None = None,
    full_share: float | None = None,
) -> tuple[RotaryConfig, RotaryConfig]:
    """Read the rotary settings of full-attention layers and of sliding-window layers.

    `rope_parameters` holds settings per layer type. In older files, `rope_theta` and `rope_scaling` apply to
    full-attention layers, and `rope_local_base_freq` to sliding-window layers. The theta arguments are defaults.
    `sliding_head_dim`: if the heads of sliding-window layers differ from `head_dim`.
    `full_share`: full-attention layers of files without settings are `proportional` with this share. Raises UserError
    as `read_rotary_config` does.
    """
    _refuse_both(config)
    both = config.get("rope_parameters", dict, {})
    full = config.get("rope_scaling", dict, {})
    if full_share is not None:
        full = {"rope_type": "proportional", "partial_rotary_factor": full_share}
    scaling = {"full_attention": full, "sliding_attention": {}} | both
    if unknown := sorted(scaling.keys() - {"full_attention", "sliding_attention"}):
        raise UserError(
            f"config.json: rope_parameters has {', '.join(unknown)}: expected full_attention, sliding_attention"
        )
    thetas = config.positive("rope_theta", theta), config.positive("rope_local_base_freq", sliding_theta)
    readers = (
        ConfigReader({"rope_theta": layer_theta, "rope_parameters": scaling[kind]}, "config.json")
        for kind, layer_theta in zip(("full_attention", "sliding_attention"), thetas, strict=True)
    )
    full_rotary, sliding_rotary = (
        read_rotary_config(reader, channels, max_position_embeddings)
        for reader, channels in zip(readers, (head_dim, sliding_head_dim or head_dim), strict=True)
    )
    return full_rotary, sliding_rotary


def _read_proportional(
    scaling: ConfigReader, head_dim: int, max_position_embeddings: int, theta: float
) -> RotaryConfig:
    share = scaling.positive("partial_rotary_factor", 1.0)
    scaling.expect("factor", (None, 1), None)
    if share > 1:
        raise UserError(f"config.json: rope_parameters: partial_rotary_factor={share} is more than 1")
    if unknown := scaling.unread():
        raise UserError(f"config.json: rope_scaling has fields that are not supported: {', '.join(unknown)}")
    return RotaryConfig(head_dim, max_position_embeddings, theta, "proportional", share=share)


def _refuse_both(config: ConfigReader) -> None:
    """Raise UserError if both keys are present with different settings.

    The code of some families reads the new key, and the code of other families reads the old key.
    """
    new, old = config.raw("rope_parameters"), config.raw("rope_scaling")
    if new and old and _without_spelling(new) != _without_spelling(old):
        raise UserError("config.json has rope_parameters and rope_scaling: leave one of them out")


def _without_spelling(scaling: Any) -> Any:
    """Return the settings without `rope_theta`, and with the older key `type` as `rope_type`."""
    if not isinstance(scaling, dict):
        return scaling
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {key: value for key, value in scaling.items() if key not in ("type", "rope_theta")} | {"rope_type": kind}


def _original_length(config: ConfigReader, scaling: ConfigReader, default: int) -> int:
    """Read the context length before scaling.

    As in transformers, the key outside the section wins. Some files hold a float.
    """
    key = "original_max_position_embeddings"
    inner, outer = scaling.raw(key), config.raw(key)
    value = outer if outer is not None else inner if inner is not None else default
    length = int(value) if isinstance(value, float) and value.is_integer() else value
    return ConfigReader({key: length}, "config.json").count(key)


def _turning_channels(config: ConfigReader, scaling: ConfigReader | None, head_dim: int, default: float) -> int:
    factor = config.positive("partial_rotary_factor", default)
    if scaling is not None:
        factor = scaling.positive("partial_rotary_factor", factor)
    channels = int(head_dim * min(factor, 2.0))
    if not 0 < channels <= head_dim or channels % 2:
        raise UserError(
            f"config.json: partial_rotary_factor={factor} turns {channels} of {head_dim} channels, not an even number of them"
        )
    return channels


def _read_yarn(scaling: ConfigReader, factor: float) -> dict[str, Any]:
    scaling.expect("finetuned", (None, True, False), None)  # only the first files have this key, and it has no effect
    return {
        "beta_fast": scaling.positive("beta_fast", 32.0),
        "beta_slow": scaling.positive("beta_slow", 1.0),
        "truncate": scaling.raw("truncate", True) is not None and scaling.get("truncate", bool, True),  # null is false
        "attention_factor": _yarn_attention_factor(scaling, factor),
        "mscale_all_dim": _positive_or_zero(scaling, "mscale_all_dim"),
    }


def yarn_mscale(factor: float, weight: float) -> float:
    """Return the factor of attention logits for a context scaled by `factor` (arXiv 2309.00071).

    `weight` is DeepSeek's addition.
    """
    return 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    attention_factor = _positive_or_zero(scaling, "attention_factor")
    numerator, denominator = _positive_or_zero(scaling, "mscale"), _positive_or_zero(scaling, "mscale_all_dim")
    if attention_factor:
        return attention_factor
    if numerator and denominator:
        return yarn_mscale(factor, numerator) / yarn_mscale(factor, denominator)
    return yarn_mscale(factor, 1.0)


def _positive_or_zero(scaling: ConfigReader, key: str) -> float:
    return scaling.positive(key) if scaling.get(key, float, 0.0) else 0.0


def _frequencies(theta: float | Tensor, head_dim: int) -> Tensor:
    """Return theta^(-2i/D), float32 [D/2] on the CPU. For theta [T, 1]: [T, D/2] on its device."""
    device = theta.device if isinstance(theta, Tensor) else "cpu"
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim))


def _llama3(c: RotaryConfig) -> Tensor:
    """Return Llama 3.1's frequencies [D/2].

    Low frequencies are divided by the factor, high frequencies are kept, and frequencies between are blended linearly.
    """
    frequencies = _frequencies(c.theta, c.head_dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = (c.original_length / wavelengths - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    blended = (1 - smooth) * frequencies / c.factor + smooth * frequencies
    result = torch.where(wavelengths > c.original_length / c.low_freq_factor, frequencies / c.factor, blended)
    return torch.where(wavelengths < c.original_length / c.high_freq_factor, frequencies, result)


def llama3_factors(c: RotaryConfig) -> Tensor:
    """Return the divisors of the frequencies in Llama 3's scaling, [D/2] float32."""
    return _frequencies(c.theta, c.head_dim) / _llama3(c)


def _yarn(c: RotaryConfig) -> Tensor:
    """Return yarn's frequencies [D/2] (arXiv 2309.00071).

    Channels with fewer than beta_slow rotations over the original context are interpolated, channels with more than
    beta_fast are kept.
    """

    def channel(rotations: float) -> float:
        return c.head_dim * math.log(c.original_length / (rotations * 2 * math.pi)) / (2 * math.log(c.theta))

    low, high = channel(c.beta_fast), channel(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.head_dim - 1)
    ramp = (torch.arange(c.head_dim // 2, device="cpu").float() - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = _frequencies(c.theta, c.head_dim)
    return frequencies / c.factor * (1 - kept) + frequencies * kept


class RotaryEmbedding:
    """Computes cos and sin of each token's angles.

    It is not a module: it has no weights, and its table stays float32.
    """

    def __init__(self, config: RotaryConfig) -> None:
        self._config = config
        if config.type == "llama3":
            frequencies = _llama3(config)
        elif config.type == "yarn":
            frequencies = _yarn(config)
        else:
            frequencies = _frequencies(config.theta, config.head_dim)
            if config.type == "proportional":
                frequencies[int(config.share * config.head_dim // 2) :] = 0
            if config.type == "linear":
                frequencies = frequencies / config.factor
        self._static = Constant(frequencies)

    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> Angles:
        """Return cos and sin [T, D/2] in `dtype`. positions, prompt_lengths: [T] int64."""
        c = self._config
        frequencies = self._static.on(positions.device)
        if c.type == "dynamic":
            frequencies = self._dynamic(torch.maximum(positions + 1, prompt_lengths))  # [T, D/2]
        return rope_angles(positions, frequencies, c.attention_factor, dtype)

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """Return the frequencies [T, D/2] of dynamic NTK scaling for lengths [T].

        Prompt tokens use the prompt's whole length, a generated token uses the length up to itself. A token's rotation
        then does not depend on the steps of the prefill or on other rows, and equals transformers' result for one
        sequence with a cache.
        """
        c = self._config
        stretch = c.factor * lengths.clamp(min=c.max_position_embeddings) / c.max_position_embeddings - (c.factor - 1)
        return _frequencies((c.theta * stretch ** (c.head_dim / (c.head_dim - 2)))[:, None], c.head_dim)


class RotaryByLayer:
    """Computes the angles of full-attention layers and of sliding-window layers."""

    def __init__(self, full: RotaryConfig, sliding: RotaryConfig) -> None:
        self._full, self._sliding = RotaryEmbedding(full), RotaryEmbedding(sliding)

    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> AnglesByLayer:
        """Return both angles, as `RotaryEmbedding.angles` does."""
        full, sliding = (
            embedding.angles(positions, prompt_lengths, dtype) for embedding in (self._full, self._sliding)
        )
        return AnglesByLayer(full, sliding)

"""Phi-3, Phi-3.5 and Phi-4, including the mini models (arXiv 2404.14219).

T tokens, H query heads, G key/value heads, D channels per head, R rotated channels per head, E hidden channels, F
feed-forward channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.kv_store import rope_and_store
from kernels.quantize_rows import Activations
from models.batch import Batch, LayerCache
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import DecoderLayer, PreNormLM, PreNormShape
from models.layers.attention import Heads, attend
from models.layers.constant import Constant
from models.layers.linear import Linear
from models.layers.mlp import FusedMLP
from models.layers.module import Module
from models.layers.rotary import Angles
from models.layout import ModelLayout, Unit


@dataclass(frozen=True)
class LongRopeConfig:
    """Long RoPE: each frequency has one divisor for short texts and one for long texts (arXiv 2402.13753).

    Without scaling, all divisors are 1.
    """

    theta: float
    original_length: int
    short_factor: tuple[float, ...]  # R/2
    long_factor: tuple[float, ...]  # R/2
    short_scale: float  # multiplies cos and sin of short texts
    long_scale: float

    @property
    def threshold(self) -> int | None:
        """The longest text in tokens with the short divisors. None: all texts have the same angles."""
        is_uniform = (self.short_factor, self.short_scale) == (self.long_factor, self.long_scale)
        return None if is_uniform else self.original_length


@dataclass(frozen=True)
class Phi3Config(PreNormShape):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_window: int | None
    rotary: LongRopeConfig

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(long_rope_threshold=self.rotary.threshold, has_windows=self.sliding_window is not None)


def read_config(config: ConfigReader) -> Phi3Config:
    """Read config.json. Raises UserError for missing, mistyped or unsupported values."""
    config.activation(("silu",), "silu")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(key, (False,), False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.expect(key, (1,), 1)
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    config.check_multiple("num_attention_heads", heads, "num_key_value_heads", groups)
    config.check_multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    max_position_embeddings = config.count("max_position_embeddings", 4096)
    return Phi3Config(
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size"),
        num_hidden_layers=config.num_layers(),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=hidden_size // heads,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-5),
        sliding_window=None if config.raw("sliding_window") is None else config.count("sliding_window"),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        rotary=read_long_rope(
            config,
            hidden_size // heads,
            max_position_embeddings,
            config.count("original_max_position_embeddings", 4096),  # in transformers, it wins over the inner key
        ),
    )


def read_long_rope(config: ConfigReader, head_dim: int, max_position_embeddings: int, original: int) -> LongRopeConfig:
    """Read the settings of long RoPE. `original`: the context length before scaling."""
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or ConfigReader({}, "config.json")
    theta = scaling.positive("rope_theta", config.positive("rope_theta", 10000.0))
    partial = scaling.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0))
    turning = int(head_dim * min(partial, 2.0))
    if not 0 < turning <= head_dim or turning % 2:
        raise UserError(
            f"config.json: partial_rotary_factor={partial} turns {turning} of {head_dim} channels, not an even number of them"
        )
    scaling.raw("original_max_position_embeddings")
    is_old = scaling.raw("type") is not None and scaling.raw("rope_type") is None  # older files use the key type
    # The first files use the names su and yarn.
    kind = scaling.expect("type" if is_old else "rope_type", ("default", "longrope", "su", "yarn"), "default")
    short = long = (1.0,) * (turning // 2)
    attention_factor = 1.0
    if kind != "default":
        short, long = (read_factors(scaling, key, turning // 2) for key in ("short_factor", "long_factor"))
        factor = scaling.positive("factor", max_position_embeddings / original)
        implied = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        attention_factor = scaling.positive("attention_factor", implied)
    if unknown := scaling.unread():
        raise UserError(f"config.json: rope_scaling has fields that are not supported: {', '.join(unknown)}")
    return LongRopeConfig(theta, original, short, long, attention_factor, attention_factor)


def read_factors(scaling: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    values = scaling.raw(key)
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"config.json: rope_scaling: {key} is not a list of {count} numbers")
    if not all(type(value) in (int, float) and 0 < value < 2**31 for value in values):
        raise UserError(f"config.json: rope_scaling: {key} holds what is not a number above 0 and below 2**31")
    return tuple(float(value) for value in values)


class LongRope:
    """Computes cos and sin of each token's angles.

    It is not a module: it has no weights, and its tables stay float32.
    """

    def __init__(self, config: LongRopeConfig) -> None:
        self._config = config
        count = len(config.short_factor)
        # On the CPU, even while a model is built on the meta device.
        powers = config.theta ** (torch.arange(0, 2 * count, 2, device="cpu").float() / (2 * count))
        self._short = Constant(1.0 / (torch.tensor(config.short_factor, device="cpu") * powers))  # [R/2]
        self._long = Constant(1.0 / (torch.tensor(config.long_factor, device="cpu") * powers))  # [R/2]
        scales = torch.tensor([[config.short_scale], [config.long_scale]], device="cpu")
        self._short_scale, self._long_scale = map(Constant, scales)  # [1] each

    def angles(self, positions: Tensor, prompt_lengths: Tensor, dtype: torch.dtype) -> Angles:
        """Return cos and sin [T, R/2] in `dtype`. positions, prompt_lengths: [T] int64.

        All tokens of a text that is longer than the original length use the long factors, all tokens of a shorter text
        use the short factors. The engine recomputes a sequence that grows past this length (`long_rope_threshold`), as
        transformers' generate() does. A rotation then depends neither on the steps of the prefill nor on other
        sequences of the batch.
        """
        is_long = (torch.maximum(positions + 1, prompt_lengths) > self._config.original_length)[:, None]
        device = positions.device
        frequencies = torch.where(is_long, self._long.on(device), self._short.on(device))  # [T, R/2]
        angles = positions[:, None].float() * frequencies
        scales = torch.where(is_long, self._long_scale.on(device), self._short_scale.on(device))  # [T, 1]
        return (angles.cos() * scales).to(dtype), (angles.sin() * scales).to(dtype)


class Attention(Module):
    def __init__(self, c: Phi3Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.window = c.sliding_window
        self.heads = Heads(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim)
        self.qkv_proj = Linear(c.hidden_size, sum(self.heads.fused) * c.head_dim, bias=False)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    @property
    def readers(self) -> Sequence[Linear]:
        """Return the linear layers that read the norm before this module, as `decoder.Attention.readers` does."""
        return [self.qkv_proj]

    def forward(self, x: Activations, angles: Angles, batch: Batch, cache: LayerCache) -> Tensor:
        fused = self.qkv_proj(x, batch).unflatten(-1, (-1, self.head_dim))  # [T, H + 2G, D]
        query, key, value = fused.split(self.heads.fused, dim=1)  # [T, H, D], [T, G, D], [T, G, D]
        query = rope_and_store(query, key, value, *angles, *cache, batch.slots)
        attended = attend(query, cache, batch, self.head_dim**-0.5, window=self.window)
        return self.o_proj(attended, batch)


class Phi3(PreNormLM):
    layout = ModelLayout(
        scale_fold_targets={},
        units={
            "qkv_proj": (Unit.QUERY_HEAD, Unit.KEY_VALUE_HEAD, Unit.KEY_VALUE_HEAD),
            "gate_up_proj": (Unit.CHANNEL, Unit.CHANNEL),
        },
    )

    def __init__(self, c: Phi3Config) -> None:
        layers = (
            DecoderLayer(c, Attention(c), FusedMLP(c.hidden_size, c.intermediate_size))
            for _ in range(c.num_hidden_layers)
        )
        super().__init__(c, layers, LongRope(c.rotary))

"""Falcon-H1: attention and Mamba-2 read the same input in each layer. Constant factors (muP, arXiv 2203.03466) scale
the parts.

T tokens, R output rows, E hidden channels, F feed-forward channels, H heads of D channels.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from conf.errors import UserError
from kernels.quantize_rows import Activations
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from models.batch import Batch, MixedCache
from models.capabilities import ModelCapabilities
from models.config import ConfigReader
from models.decoder import Attention, DecoderConfig, DecoderLM, read_decoder_config, residual_norm
from models.families.granite import ScaledHead
from models.layers.constant import Constant
from models.layers.linear import swiglu_for
from models.layers.mamba2 import GatedRMSNorm, Mamba2, Mamba2Config, StateSpaceHeads, read_mamba2
from models.layers.mlp import MLP
from models.layers.module import Module
from models.layers.named_parts import NamedParts
from models.layers.norm import ResidualStream
from models.layers.rotary import Angles
from models.layout import ModelLayout


@dataclass(frozen=True)
class Multipliers:
    embedding: float
    logits: float
    attention_input: float
    key: float
    attention_output: float
    mamba_input: float
    mamba_sections: tuple[float, ...]
    """Of in_proj's outputs gate, x, B, C and dt."""
    mamba_output: float
    mlp_gate: float
    mlp_output: float


@dataclass(frozen=True)
class FalconH1Config(DecoderConfig):
    mamba: Mamba2Config
    has_norm: bool
    """Whether Mamba-2 has a norm."""
    norm_before_gate: bool
    """Whether the norm reads the heads' outputs instead of their product with the gate."""
    multipliers: Multipliers
    attention_bias: bool
    mlp_bias: bool

    @property
    def capabilities(self) -> ModelCapabilities:
        return replace(super().capabilities, is_recurrent=True)

    @property
    def recurrent_layers(self) -> tuple[bool, ...]:
        return (True,) * self.num_hidden_layers


def read_config(config: ConfigReader) -> FalconH1Config:
    """Read config.json, with defaults as in transformers.

    Raises UserError for missing, mistyped or unsupported values.
    """
    shape = read_decoder_config(config, 1e-5, 8192)
    config.expect("attn_layer_indices", (None,), None)  # every layer has all parts
    config.expect("mamba_use_mlp", (True, None), None)
    for key in ("layer_types", "layers_block_type"):
        config.expect(key, (["hybrid"] * shape.num_hidden_layers, None), None)
    for key in ("num_logits_to_keep", "mlp_expansion_factor"):
        config.raw(key)
    mamba = read_mamba2(config, shape.hidden_size, shape.rms_norm_eps)
    return FalconH1Config(
        **vars(shape),
        mamba=replace(mamba, has_output_bias=config.get("projectors_bias", bool, False)),
        has_norm=config.get("mamba_rms_norm", bool, False),
        norm_before_gate=config.get("mamba_norm_before_gate", bool, True),
        multipliers=_read_multipliers(config),
        attention_bias=config.get("attention_bias", bool, False),
        mlp_bias=config.get("mlp_bias", bool, False),
    )


def _read_multipliers(config: ConfigReader) -> Multipliers:
    gate, output = _factors(config, "mlp_multipliers", 2)
    return Multipliers(
        embedding=config.positive("embedding_multiplier", 1.0),
        logits=config.positive("lm_head_multiplier", 1.0),
        attention_input=config.positive("attention_in_multiplier", 1.0),
        key=config.positive("key_multiplier", 1.0),
        attention_output=config.positive("attention_out_multiplier", 1.0),
        mamba_input=config.positive("ssm_in_multiplier", 1.0),
        mamba_sections=_factors(config, "ssm_multipliers", 5),
        mamba_output=config.positive("ssm_out_multiplier", 1.0),
        mlp_gate=gate,
        mlp_output=output,
    )


def _factors(config: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Read a list of factors, by default ones. Raises UserError unless it is a list of `count` positive numbers."""
    values = config.raw(key)
    if values is None:
        return (1.0,) * count
    are_numbers = isinstance(values, list) and all(type(value) in (int, float) and value > 0 for value in values)
    if not are_numbers or len(values) != count:
        raise UserError(f"config.json: {key}={values!r} is not a list of {count} positive numbers")
    return tuple(map(float, values))


class NormThenGate(GatedRMSNorm):
    """norm(x) * silu(gate), for each group of channels apart."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        groups = zip(x.split(self.group_size, 1), self.weight.split(self.group_size), strict=True)
        normed = torch.cat([rms_norm(part.contiguous(), weight, self.eps) for part, weight in groups], 1)
        return swiglu(gate, normed)


class OnlyGate(Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x * silu(gate). x, gate and the result are [R, H * D]."""
        return swiglu(gate, x)


def _make_norm(c: FalconH1Config) -> Module:
    if not c.has_norm:
        return OnlyGate()
    norm = NormThenGate if c.norm_before_gate else GatedRMSNorm
    return norm(c.mamba.heads.size, c.mamba.heads.num_groups, c.mamba.eps)


class ScaledMamba2(Mamba2):
    """Mamba-2 with factors on the sections of in_proj's outputs."""

    def __init__(self, c: FalconH1Config) -> None:
        self._multipliers = c.multipliers  # read by _set_heads
        super().__init__(c.hidden_size, c.mamba, _make_norm(c))

    def _set_heads(self, heads: StateSpaceHeads, num_taps: int, conv_bias: bool, device: torch.device) -> None:
        super()._set_heads(heads, num_taps, conv_bias, device)
        sizes = heads.size, heads.size, heads.group_size, heads.group_size, heads.num_heads
        sections = zip(self._multipliers.mamba_sections, sizes, strict=True)
        self._factors = Constant(torch.cat([torch.full((size,), factor, device="cpu") for factor, size in sections]))

    def project(self, x: Activations, batch: Batch) -> Tensor:
        projected = super().project(x, batch)
        return (projected * self._factors.on(projected.device)).to(projected.dtype)


class ScaledMLP(MLP):
    """`MLP` with factors on the gate and on the output."""

    def __init__(self, c: FalconH1Config) -> None:
        super().__init__(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self._gate_multiplier, self._output_multiplier = c.multipliers.mlp_gate, c.multipliers.mlp_output

    def forward(self, x: Activations, batch: Batch | None) -> Tensor:
        gate, up = self.gate_up(x, batch)  # [T, F] each
        down = self.parts[-1]
        projected: Tensor = down(swiglu_for([down], gate * self._gate_multiplier, up), batch)
        return projected * self._output_multiplier


class ScaledAttention(Attention):
    """Attention with a factor on its keys."""

    def __init__(self, c: FalconH1Config) -> None:
        super().__init__(c, qkv_bias=c.attention_bias, o_bias=c.attention_bias)
        self.scale *= c.multipliers.key  # the same as a factor on keys, also on rotated ones


class HybridLayer(NamedParts):
    """Pre-norm: y = x + mamba(norm(x)) + attention(norm(x)), then y + mlp(norm(y)), with factors on the parts."""

    names = ("input_layernorm", "mamba", "self_attn", "pre_ff_layernorm", "feed_forward")

    def __init__(self, c: FalconH1Config) -> None:
        super().__init__(residual_norm(c), ScaledMamba2(c), ScaledAttention(c), residual_norm(c), ScaledMLP(c))
        self._multipliers = c.multipliers

    def forward(self, stream: ResidualStream, angles: Angles | None, batch: Batch, cache: MixedCache) -> ResidualStream:
        (norm, mamba, attention, mlp_norm, mlp), factors = self.parts, self._multipliers
        normed, x = norm(*stream)  # [T, E] each
        by_mamba = mamba(normed * factors.mamba_input, angles, batch, cache.recurrent) * factors.mamba_output
        attended = attention(normed * factors.attention_input, angles, batch, cache.attention)
        mixed = by_mamba + attended * factors.attention_output
        normed, x = mlp_norm(batch.attending(x), mixed, mlp.readers)
        return ResidualStream(x, mlp(normed, batch))


class FalconH1(DecoderLM):
    layout = ModelLayout(
        final_norm="model.final_layernorm",
        recurrent="mamba",
        norms=("input_layernorm", "pre_ff_layernorm"),
        row_parallel=("o_proj", "out_proj", "down_proj"),
    )
    float32_tensors = ("A_log", "dt_bias", "mamba.D")

    def __init__(self, c: FalconH1Config) -> None:
        layers: list[nn.Module] = [HybridLayer(c) for _ in range(c.num_hidden_layers)]
        super().__init__(c, layers)
        self.lm_head = ScaledHead(self.embedding, c.tie_word_embeddings, 1 / c.multipliers.logits)  # type: ignore[arg-type]
        self._embedding_multiplier = c.multipliers.embedding

    def embed(self, batch: Batch) -> ResidualStream:
        return ResidualStream(self.embedding(batch.token_ids) * self._embedding_multiplier)

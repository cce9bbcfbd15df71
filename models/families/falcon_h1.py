"""Falcon-H1: attention and Mamba-2 read the same input in each layer. Constant factors (muP, arXiv 2203.03466) scale
the parts.

T tokens, R output rows, E hidden channels, F feed-forward channels, H heads of D channels.
"""

import torch
from torch import Tensor, nn

from kernels.quantize_rows import Activations
from models.batch import Batch, MixedCache
from models.decoder import Attention, DecoderLM, residual_norm
from models.families.falcon_h1_config import FalconH1Config
from models.families.granite import ScaledHead
from models.layers.constant import Constant
from models.layers.gated_norm import GatedRMSNorm, NormThenGate, OnlyGate
from models.layers.linear import swiglu_for
from models.layers.mamba2 import Mamba2, StateSpaceHeads
from models.layers.mlp import MLP
from models.layers.named_parts import NamedParts
from models.layers.norm import ResidualStream
from models.layers.rotary import Angles
from models.layout import ModelLayout


def _make_norm(c: FalconH1Config) -> GatedRMSNorm | OnlyGate:
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

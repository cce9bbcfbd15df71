"""Gemma 4: Gemma 3 with heads per type of layer, values that are normed, keys and values that layers share, and
inputs per layer.

T tokens, E hidden channels, L layers, P channels of a layer's input, N experts, K experts per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.gelu import gelu_tanh
from kernels.moe import route
from models.batch import Batch, LayerCache
from models.causal_lm import CausalLM, Stream
from models.families.gemma2 import CappedHead
from models.families.gemma4_attention import IN_FLOAT32, Attention
from models.families.gemma4_config import Gemma4Config
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import GELUMLP
from models.layers.module import Module
from models.layers.moe import Experts, MixtureConfig
from models.layers.norm import RMSNorm, StreamWithInputs, WeightlessRMSNorm
from models.layers.rotary import AnglesByLayer, RotaryByLayer
from models.layout import ModelLayout


class Router(Module):
    """Chooses the experts of x [T, E], which it norms without a weight."""

    def __init__(self, hidden_size: int, c: MixtureConfig, eps: float) -> None:
        super().__init__()
        self.norm, self.num_experts_per_tok = WeightlessRMSNorm(hidden_size, eps), c.num_experts_per_tok
        self.proj = Linear(hidden_size, c.num_experts, bias=False, is_quantizable=False)
        self.scale = nn.Parameter(torch.empty(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(c.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights float32 [T, K] and experts int64 [T, K]."""
        normed = self.norm(x)
        assert isinstance(normed, Tensor)
        logits = self.proj(normed * self.scale * x.shape[1] ** -0.5, None)  # [T, N]
        weights, chosen = route(logits, self.num_experts_per_tok, True)
        return weights * self.per_expert_scale[chosen], chosen


class DecoderLayer(Module):
    def __init__(self, c: Gemma4Config, number: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(c)
        self.self_attn = Attention(c, number)
        self.post_attention_layernorm = _norm(c)
        self.pre_feedforward_layernorm = _norm(c)
        is_wide = c.has_wide_mlps and number >= c.first_sharing
        self.mlp = GELUMLP(c.hidden_size, c.intermediate_size * (1 + is_wide))
        self.post_feedforward_layernorm = _norm(c)
        self.layer_scalar = nn.Parameter(torch.empty(1))
        self.router = None if c.mixture is None else Router(c.hidden_size, c.mixture, c.rms_norm_eps)
        if c.mixture is not None:
            sizes = c.hidden_size, c.mixture.moe_intermediate_size
            experts = (GELUMLP(*sizes) for _ in range(c.mixture.num_experts))
            self.experts = Experts(experts, c.mixture.num_experts_per_tok)
            self.pre_feedforward_layernorm_2 = _norm(c)
            self.post_feedforward_layernorm_1 = _norm(c)
            self.post_feedforward_layernorm_2 = _norm(c)

    def forward(self, x: Tensor, angles: AnglesByLayer, batch: Batch, cache: LayerCache) -> Tensor:
        return self.block(x, angles, batch, cache) * self.layer_scalar

    def block(self, x: Tensor, angles: AnglesByLayer, batch: Batch, cache: LayerCache) -> Tensor:
        """Return x after attention and feed-forward."""
        attended = self.self_attn(self.input_layernorm(x, self.self_attn.readers), angles, batch, cache)
        x = batch.attending(x) + self.post_attention_layernorm(attended)
        return self.feed_forward(x, batch)

    def feed_forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.mlp(self.pre_feedforward_layernorm(x, self.mlp.readers), batch)
        if self.router is not None:
            mixed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(mixed)
        return x + self.post_feedforward_layernorm(y)


class DecoderLayerWithInput(DecoderLayer):
    """A layer that also reads its part of the stream's inputs: P channels (per-layer embeddings)."""

    def __init__(self, c: Gemma4Config, number: int, num_channels: int) -> None:
        super().__init__(c, number)
        self.channels = slice(number * num_channels, (number + 1) * num_channels)
        self.per_layer_input_gate = Linear(c.hidden_size, num_channels, bias=False)
        self.per_layer_projection = Linear(num_channels, c.hidden_size, bias=False)
        self.post_per_layer_input_norm = _norm(c)

    def forward(  # type: ignore[override]
        self, stream: StreamWithInputs, angles: AnglesByLayer, batch: Batch, cache: LayerCache
    ) -> StreamWithInputs:
        x, inputs = self.block(stream.x, angles, batch, cache), batch.attending(stream.inputs)
        gated = gelu_tanh(self.per_layer_input_gate(x, batch), inputs[:, self.channels])  # [T, P]
        x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated, batch))
        return StreamWithInputs(x * self.layer_scalar, inputs)


def _norm(c: Gemma4Config) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.rms_norm_eps, IN_FLOAT32)


class Decoder(Module):
    def __init__(self, c: Gemma4Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        make_layer: Callable[[int], DecoderLayer] = partial(DecoderLayer, c)
        if c.layer_inputs is not None:
            num_channels = c.layer_inputs.channels
            width = len(c.windows) * num_channels
            self.embed_tokens_per_layer = Embedding(c.layer_inputs.vocab_size, width)
            self.per_layer_model_projection = Linear(c.hidden_size, width, bias=False, is_quantizable=False)
            self.per_layer_projection_norm = RMSNorm(num_channels, c.rms_norm_eps, IN_FLOAT32)
            make_layer = partial(DecoderLayerWithInput, c, num_channels=num_channels)
        self.layers = nn.ModuleList(make_layer(number) for number in range(c.num_hidden_layers))
        self.norm = _norm(c)

    def layer_inputs(self, x: Tensor, token_ids: Tensor, num_channels: int) -> Tensor:
        """Return the inputs of all layers [T, L * P] of the embedded tokens x [T, E]."""
        projected = self.per_layer_model_projection(x, None) * x.shape[1] ** -0.5
        normed = self.per_layer_projection_norm(projected.unflatten(1, (-1, num_channels)).flatten(0, 1))
        assert isinstance(normed, Tensor)
        of_tokens = self.embed_tokens_per_layer(token_ids)
        of_tokens = of_tokens * of_tokens.new_full((), num_channels**0.5)
        return (normed.view(of_tokens.shape) + of_tokens) * 2**-0.5


class Gemma4(CausalLM):
    config: Gemma4Config
    layout = ModelLayout(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        replicated=("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection", "proj"),
        scale_fold_targets={"down_proj": "up_proj"},  # the norm of the values would undo a fold into v_proj
    )

    def __init__(self, c: Gemma4Config) -> None:
        super().__init__(c)
        self.model = self.make_decoder(c)
        self.lm_head = CappedHead(self.model.embed_tokens, c.tie_word_embeddings, c.final_logit_softcapping)
        self.rotary = RotaryByLayer(c.rotary, c.sliding_rotary)

    def make_decoder(self, c: Gemma4Config) -> Any:
        return Decoder(c)

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The tensors of shared keys and values, which some files hold without a use."""
        unused = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        return tuple(f"model.layers.{i}.self_attn.{part}" for i in self.config.shared_caches for part in unused)

    @property
    def stream_width(self) -> int:
        inputs = self.config.layer_inputs
        return self.config.hidden_size + (0 if inputs is None else len(self.config.windows) * inputs.channels)

    def embed(self, batch: Batch) -> Stream:
        x: Tensor = self.model.embed_tokens(batch.token_ids)  # [T, E]
        x = x * x.new_full((), self.config.hidden_size**0.5)  # rounded to the model's dtype, as in Gemma 2
        inputs = self.config.layer_inputs
        if inputs is None:
            return x
        return StreamWithInputs(x, self.model.layer_inputs(x, batch.token_ids, inputs.channels))

    def received_stream(self, x: Tensor) -> Stream:
        size = self.config.hidden_size
        return x if self.config.layer_inputs is None else StreamWithInputs(x[:, :size], x[:, size:])

    def finish(self, stream: Stream) -> Tensor:
        return super().finish(stream.x if isinstance(stream, StreamWithInputs) else stream)

    def layer_inputs(self, batch: Batch, dtype: torch.dtype) -> tuple[AnglesByLayer]:
        return (self.rotary.angles(batch.positions, batch.prompt_lengths, dtype),)

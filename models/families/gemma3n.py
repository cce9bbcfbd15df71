"""Gemma 3n: Gemma 4's attention and inputs per layer, with several residual streams (AltUp, arXiv 2301.13310), low-rank
residual layers (LAuReL, arXiv 2411.07501) and sparse gates.

T tokens, E hidden channels, N streams, L layers, P channels of a layer's input, F feed-forward channels.
"""

from statistics import NormalDist

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from kernels.gelu import gelu_tanh
from kernels.layer_norm import layer_norm
from models.batch import Batch, LayerCache
from models.families import gemma4
from models.families.gemma3n_config import MOST_STREAMS, Gemma3nConfig
from models.families.gemma4_attention import IN_FLOAT32, Attention
from models.families.gemma4_config import Gemma4Config
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.mlp import GELUMLP
from models.layers.module import Module
from models.layers.norm import RMSNorm, StreamWithInputs, WeightlessRMSNorm
from models.layers.rotary import AnglesByLayer
from models.layout import ModelLayout

SMALLEST = 1e-30
"""The epsilon of norms that measure a scale."""
SMALLEST_SCALE = 1e-5**0.5  # transformers' constant


class RootMeanSquare:
    """The root mean square [T, 1] of x [T, E] in float32, exact in any batch.

    A norm divides by it, so it is the ratio of the largest magnitudes before and after the norm, which sums in a fixed
    order.
    """

    def __init__(self, size: int) -> None:
        self._norm = WeightlessRMSNorm(size, SMALLEST)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        return _largest(x) / _largest(self._norm(x)).clamp(min=SMALLEST)

    def scaled_like(self, x: Tensor, target: Tensor) -> Tensor:
        """Return x with the root mean square `target` [T, 1]."""
        return x * (target / self(x).clamp(min=SMALLEST_SCALE)).to(x.dtype)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def keep_largest(x: Tensor, cutoff: float) -> Tensor:
    """Return relu(x - mean - cutoff * deviation) of each row of x [T, F], exact in any batch.

    The norm (x - mean) / deviation sums in a fixed order; the deviation is the ratio of the ranges before and after it.
    """
    wide = x.float()
    normed = layer_norm(wide, None, None, SMALLEST)
    span, normed_span = (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True) for y in (wide, normed))
    return (relu(normed - cutoff) * (span / normed_span.clamp(min=SMALLEST))).to(x.dtype)


class SparseMLP(GELUMLP):
    """`GELUMLP` that sets most of the gate's values to 0."""

    def __init__(self, hidden_size: int, intermediate_size: int, sparsity: float) -> None:
        super().__init__(hidden_size, intermediate_size)
        self._cutoff = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:  # type: ignore[override]
        gate, up = self.gate_up(x, batch)
        result: Tensor = self.parts[-1](gelu_tanh(keep_largest(gate, self._cutoff), up), batch)
        return result


def _matrix(inputs: int, outputs: int) -> Linear:
    return Linear(inputs, outputs, bias=False, is_quantizable=False)


class AltUp(Module):
    """Predicts all streams from each other, and corrects them by the active stream that the layer computes."""

    def __init__(self, c: Gemma3nConfig) -> None:
        super().__init__()
        self.active, count = c.active, c.num_streams
        self.correct_output_scale = nn.Parameter(torch.empty(c.hidden_size))
        self.correction_coefs = _matrix(count, count)
        self.prediction_coefs = _matrix(count, count * count)
        self.modality_router = _matrix(c.hidden_size, count)
        self.router_norm = _norm(c)

    def _routed(self, x: Tensor) -> Tensor:
        """Return weights [T, N] of the active stream x [T, E]."""
        normed = self.router_norm(x)
        return self.modality_router(normed * x.shape[1] ** -1.0, None).float().tanh().to(x.dtype)

    def predict(self, streams: list[Tensor]) -> list[Tensor]:
        weights = self.prediction_coefs(self._routed(streams[self.active]), None).unflatten(1, (len(streams), -1))
        predictions = []
        for i, stream in enumerate(streams):
            update = weights[:, i, :1] * streams[0]
            for j in range(1, len(streams)):
                update = update + weights[:, i, j : j + 1] * streams[j]
            predictions.append(update + stream)
        return predictions

    def correct(self, predictions: list[Tensor], x: Tensor) -> list[Tensor]:
        weights = self.correction_coefs(self._routed(x), None) + 1.0  # [T, N]
        change = x - predictions[self.active]
        return [change * weights[:, i : i + 1] + prediction for i, prediction in enumerate(predictions)]


class Laurel(Module):
    """x + norm(right(left(x)))."""

    def __init__(self, c: Gemma3nConfig) -> None:
        super().__init__()
        self.linear_left = _matrix(c.hidden_size, c.laurel_rank)
        self.linear_right = _matrix(c.laurel_rank, c.hidden_size)
        self.post_laurel_norm = _norm(c)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x, batch), batch))


class DecoderLayer(Module):
    def __init__(self, c: Gemma3nConfig, number: int) -> None:
        super().__init__()
        assert c.layer_inputs is not None
        channels = c.layer_inputs.channels
        self.channels, self.scales_active = slice(number * channels, (number + 1) * channels), c.scales_active
        self.altup = AltUp(c)
        self.input_layernorm = _norm(c)
        self.laurel = Laurel(c)
        self.self_attn = Attention(c, number)
        self.post_attention_layernorm = _norm(c)
        self.pre_feedforward_layernorm = _norm(c)
        sizes, sparsity = (c.hidden_size, c.inner_sizes[number]), c.sparsity[number]
        self.mlp = SparseMLP(*sizes, sparsity) if sparsity else GELUMLP(*sizes)
        self.post_feedforward_layernorm = _norm(c)
        self.per_layer_input_gate = Linear(c.hidden_size, channels, bias=False)
        self.per_layer_projection = Linear(channels, c.hidden_size, bias=False)
        self.post_per_layer_input_norm = _norm(c)

    def forward(
        self, stream: StreamWithInputs, angles: AnglesByLayer, batch: Batch, cache: LayerCache
    ) -> StreamWithInputs:
        count = self.altup.correction_coefs.shape[0]
        predictions = self.altup.predict(list(stream.x.unflatten(1, (count, -1)).unbind(1)))
        normed = self.input_layernorm(predictions[self.altup.active])
        laurel = batch.attending(self.laurel(normed, batch))
        attended = self.post_attention_layernorm(self.self_attn(normed, angles, batch, cache))
        predictions = [batch.attending(prediction) for prediction in predictions]
        x = (predictions[self.altup.active] + attended + laurel) * 2**-0.5
        y = self.mlp(self.pre_feedforward_layernorm(x, self.mlp.readers), batch)
        first, *others = self.altup.correct(predictions, x + self.post_feedforward_layernorm(y))
        inputs = batch.attending(stream.inputs)
        update = self._of_input((first, *others)[self.altup.active], inputs[:, self.channels], batch)
        return StreamWithInputs(torch.cat([first, *(other + update for other in others)], dim=1), inputs)

    def _of_input(self, x: Tensor, inputs: Tensor, batch: Batch) -> Tensor:
        """Return the update [T, E] of all streams but the first by the layer's own input [T, P]."""
        if self.scales_active:
            x = x * self.altup.correct_output_scale
        gated = gelu_tanh(self.per_layer_input_gate(x, batch), inputs)
        return self.post_per_layer_input_norm(self.per_layer_projection(gated, batch))


def _norm(c: Gemma3nConfig) -> RMSNorm:
    return RMSNorm(c.hidden_size, c.rms_norm_eps, IN_FLOAT32)


class Decoder(Module):
    def __init__(self, c: Gemma3nConfig) -> None:
        super().__init__()
        assert c.layer_inputs is not None
        width = len(c.windows) * c.layer_inputs.channels
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.embed_tokens_per_layer = Embedding(c.layer_inputs.vocab_size, width)
        self.per_layer_model_projection = _matrix(c.hidden_size, width)
        self.per_layer_projection_norm = RMSNorm(c.layer_inputs.channels, c.rms_norm_eps, IN_FLOAT32)
        others = range(1, c.num_streams)
        self.altup_projections = nn.ModuleList(_matrix(c.hidden_size, c.hidden_size) for _ in others)
        self.layers = nn.ModuleList(DecoderLayer(c, number) for number in range(c.num_hidden_layers))
        self.altup_unembed_projections = nn.ModuleList(_matrix(c.hidden_size, c.hidden_size) for _ in others)
        self.norm = _norm(c)

    layer_inputs = gemma4.Decoder.layer_inputs


class Gemma3n(gemma4.Gemma4):
    config: Gemma3nConfig
    layout = ModelLayout(
        norms=("pre_feedforward_layernorm",),  # other modules also read the other norm
        row_parallel=("o_proj",),
        replicated=(
            *("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"),
            *("modality_router", "prediction_coefs", "correction_coefs", "linear_left", "linear_right"),
            *("gate_proj", "up_proj", "down_proj"),  # a sparse gate needs the mean of all channels
            *map(str, range(MOST_STREAMS)),  # projections between streams
        ),
        scale_fold_targets={"down_proj": "up_proj"},
    )

    def make_decoder(self, c: Gemma4Config) -> Module:
        assert isinstance(c, Gemma3nConfig)
        self._root_mean_square = RootMeanSquare(c.hidden_size)
        return Decoder(c)

    @property
    def stream_width(self) -> int:
        return super().stream_width + (self.config.num_streams - 1) * self.config.hidden_size

    def embed(self, batch: Batch) -> StreamWithInputs:
        c, decoder = self.config, self.model
        assert c.layer_inputs is not None
        x: Tensor = decoder.embed_tokens(batch.token_ids)  # [T, E]
        x = x * x.new_full((), c.hidden_size**0.5)
        # an id without a row of the table uses row 0
        ids = batch.token_ids * (batch.token_ids < c.layer_inputs.vocab_size)
        inputs = decoder.layer_inputs(x, ids, c.layer_inputs.channels)
        target = self._root_mean_square(x)
        others = [self._root_mean_square.scaled_like(matrix(x, None), target) for matrix in decoder.altup_projections]
        return StreamWithInputs(torch.cat([x, *others], dim=1), inputs)

    def received_stream(self, x: Tensor) -> StreamWithInputs:
        size = self.config.num_streams * self.config.hidden_size
        return StreamWithInputs(x[:, :size], x[:, size:])

    def finish(self, stream: StreamWithInputs) -> Tensor:  # type: ignore[override]
        first, *others = stream.x.unflatten(1, (self.config.num_streams, -1)).unbind(1)
        target, total = self._root_mean_square(first), first
        for matrix, other in zip(self.model.altup_unembed_projections, others, strict=True):
            total = total + self._root_mean_square.scaled_like(matrix(other, None), target)
        normed = self.model.norm(total * (1 / self.config.num_streams))
        assert isinstance(normed, Tensor)
        return normed

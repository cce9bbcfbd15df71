"""Run a model layer by layer over calibration batches and observe the inputs of its linear layers.

Only one layer's activations are in memory at a time.

T tokens of a batch, E hidden channels, I input channels of a linear layer, G key/value heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from kernels.kv_format import PagedVectors
from models.batch import AnyCache, Batch, KVCache, LayerCache, attention_cache, cache_kind
from models.causal_lm import CacheContent, CausalLM, Stream, stream_tensor
from models.layers.linear import Linear
from models.layers.linear_method import LinearMethod
from models.layers.tensor_parallel import RowParallelReduce
from models.linear_layers import packed_method
from quantization.activations import ActivationRange, best_static_scale
from quantization.codes import CodeKind
from quantization.hessian import Hessian

PROBE_TOKENS = 16  # enough, because a fold that changes a layer's output changes it for every token
NUM_SAMPLES = 512  # activation rows for scale searches and reports


@dataclass(frozen=True)
class Statistics:
    """The statistics to keep in addition to a sample of the rows. Each statistic takes a pass over all rows."""

    hessian: bool = False
    ranges: bool = True
    norms: bool = True


class ActivationStats:
    """Statistics of the input of one or more linear layers that share it, after all folded scales and shifts."""

    def __init__(self, linears: list[str], norm: str | None, x: Tensor, statistics: Statistics) -> None:
        self.linears = linears
        """Their names."""
        self.norm = norm
        """The norm whose output is this input, or None."""
        self.hessian = Hessian(x.shape[1], x.device) if statistics.hessian else None
        self._range = ActivationRange(x.shape[1], x.device) if statistics.ranges else None
        self._squares = torch.zeros(x.shape[1], device=x.device) if statistics.norms else None
        self.num_rows = 0
        """The number of tokens."""
        self._samples: list[Tensor] = []  # [some T, I] each
        self._shift: Tensor = torch.zeros(x.shape[1], device=x.device)
        self._scales: Tensor = torch.ones(x.shape[1], device=x.device)
        self._static_scales: dict[CodeKind, Tensor] = {}

    def add(self, x: Tensor, num_samples: int) -> None:
        """Update the statistics with x [T, I], and keep about `num_samples` of its rows."""
        self.num_rows += len(x)
        if self._range:
            self._range.add(x)
        if self._squares is not None:
            self._squares += torch.linalg.vector_norm(x, dim=0, dtype=torch.float32).square()
        self._samples.append(x[:: max(1, -(-len(x) // num_samples))].clone())
        if self.hessian:
            self.hessian.add(x)

    @property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the minimum and the maximum of each channel, [I] float32 each."""
        assert self._range
        low, high = self._range.bounds()
        return (low - self._shift) / self._scales, (high - self._shift) / self._scales

    @property
    def absmax(self) -> Tensor:
        """Return the largest magnitude of each channel, [I] float32."""
        low, high = self.bounds
        return torch.maximum(low.abs(), high.abs())

    @property
    def norms(self) -> Tensor:
        """Return the L2 norm of each channel, [I] float32, without any folds."""
        return self.squares.sqrt()

    @property
    def squares(self) -> Tensor:
        """Return the sum of squares of each channel, [I] float32, without any folds."""
        assert self._squares is not None
        return self._squares

    @property
    def sample(self) -> Tensor:
        """Return about NUM_SAMPLES rows, [.., I] float32."""
        return (torch.cat(self._samples).float() - self._shift) / self._scales

    def static_scale(self, kind: CodeKind) -> Tensor:
        """Return the static scale [] float32 for the current input."""
        if kind not in self._static_scales:
            self._static_scales[kind] = best_static_scale(self.absmax, self.sample, kind)
        return self._static_scales[kind]

    def shift_by(self, shift: Tensor) -> None:
        """Subtract shift [I] from the input from now on."""
        self._static_scales.clear()
        self._shift = self._shift + shift * self._scales

    def divide(self, scales: Tensor) -> None:
        """Divide the input by scales [I] from now on."""
        self._static_scales.clear()
        self._scales = self._scales * scales


@dataclass
class _BatchState:
    """A batch and its hidden states before the next layer."""

    batch: Batch
    stream: Stream
    read_later: dict[int, LayerCache] = field(default_factory=dict)
    """The keys and values of earlier layers that later layers read, by the number of the layer."""


class SequentialCalibrator:
    """Run all batches through a model, one layer after the other.

    Holds their streams (hidden states) before the next layer.

    With `sequential`, the inputs of a layer come from the quantised layers before it: one pass observes the layer, and
    a second pass runs the batches through the quantised layer. Otherwise they come from the float layers, and one pass
    does both.

    Each rank of a pipeline stage has its own calibrator and runs its shards of the layers. Sharded inputs are gathered
    on the stage's first rank, which `collects`, so that it observes the same inputs as a single process. The previous
    stage sends the streams.
    """

    def __init__(
        self,
        model: CausalLM,
        batches: list[Batch],
        probe: Batch,
        cache: KVCache,
        sequential: bool = True,
        with_cache: bool = False,
        collects: bool = True,
        unsharded: tuple[CausalLM, KVCache] | None = None,
    ) -> None:
        """Prepare calibration; a first pipeline stage embeds the batches.

        probe: a short extra batch. Its output shows whether a fold changes what a layer computes. cache: an unquantised
        KV cache of one layer of each shape, with room for a batch, which is one step. with_cache: also observe the keys and values
        written into it. collects: keep statistics of inputs; a rank without it only takes part in the gathers.
        unsharded: the unsharded model, if `model` is a rank's shard, and such a cache with room for the probe.
        """
        self._model, self._cache, self._sequential, self._with_cache = model, cache, sequential, with_cache
        self._collects = collects
        self._unsharded = unsharded or (model, cache)
        self._batches = [probe, *batches]
        self._next = model.local_layers.start
        self._states: list[_BatchState] = []
        """First the probe's, then one per batch."""
        self._samples_per_batch = -(-NUM_SAMPLES // len(batches))
        self.batch_seconds = 0.0
        """Seconds spent so far in layers and in observation of batches; grows with the number of tokens."""
        self._absmax: list[Tensor] = []  # per batch: [2, G] of keys and values in the current pass
        if model.before is None:
            self._begin(model.embed)

    def receive(self) -> None:
        """Receive the streams from the previous stage, before this stage's first layer."""
        before, dtype = self._model.before, self._cache.dtype
        assert before is not None
        self._begin(
            lambda batch: self._model.received_stream(
                before.receive(batch.shape.num_tokens, dtype, batch.numbers.device)
            )
        )

    @torch.inference_mode()
    def _begin(self, stream_of: Callable[[Batch], Stream]) -> None:
        self._states = [_BatchState(batch, stream_of(batch)) for batch in self._batches]

    @torch.inference_mode()
    def send(self) -> None:
        """Send the streams to the next stage, after this stage's last layer."""
        assert self._model.after is not None
        for state in self._states:
            self._model.after.send(stream_tensor(state.stream))
        self._states.clear()

    def observe(self, linears: Sequence[str] = (), statistics: Statistics = Statistics()) -> list[ActivationStats]:
        """Return the input statistics of the next layer's linear layers. `linears` are their names within the layer.

        Linear layers with the same input share one group. Linear layers that no token reaches are in no group.
        """
        if self._sequential and not linears:
            return []
        is_alone = self._unsharded[0] is self._model  # ranks wait for each other's part of the layer's output
        stops = self._sequential and is_alone
        observer = _InputObserver(self._samples_per_batch, statistics, self._collects, linears if stops else ())
        layer, norms = self._model.layers[self._next], self._model.layout.norms
        with self._fast_methods(), observer.hooked(layer, linears, norms):
            self._run_batches(keeps_outputs=not self._sequential, after_batch=observer.forget)
        return list(observer.groups.values())

    def output(self) -> Tensor:
        """Return the probe's hidden states [T, E] after the next layer, with the layer's current weights."""
        return stream_tensor(self._run_layer(self._states[0], *self._unsharded))

    def advance(self) -> tuple[Tensor, Tensor] | None:
        """Advance by one layer. Without `sequential`, `observe` must have been called for the next layer.

        Returns the largest magnitudes of its keys and of its values per head, [G] float32 each. None for a layer without
        attention, and without `with_cache`.
        """
        if self._sequential:
            self._run_batches(keeps_outputs=True)
        self._states[0].stream = self._run_layer(self._states[0], self._model, self._cache)
        with_cache = self._with_cache and self._content(self._model).heads is not None
        self._next += 1
        if not with_cache:
            return None
        keys, values = torch.stack(self._absmax).amax(0)
        return keys, values

    def _run_batches(self, keeps_outputs: bool, after_batch: Callable[[], None] = lambda: None) -> None:
        """Run all batches through the next layer. With `keeps_outputs`, their streams become the layer's outputs."""
        caches, start = None, perf_counter()
        if self._with_cache:
            caches = attention_cache(self._layer_cache(self._model, self._cache))
        self._absmax.clear()
        for state in self._states[1:]:
            with suppress(_AllObserved):
                stream = self._run_layer(state, self._model, self._cache)
                if keeps_outputs:
                    state.stream = stream
                    if caches is not None:
                        self._absmax.append(torch.stack([_absmax(cache, state.batch.slots) for cache in caches]))
            after_batch()
        self.batch_seconds += perf_counter() - start

    @torch.inference_mode()
    def _run_layer(self, state: _BatchState, model: CausalLM, cache: KVCache) -> Stream:
        layer_cache, shared = self._layer_cache(model, cache), model.config.shared_caches
        if self._next in shared:
            layer_cache = state.read_later[shared[self._next]]
        cache = replace(cache, layers=[layer_cache])
        stream = model.run_layers(state.stream, state.batch, cache, range(self._next, self._next + 1))
        if self._next in shared.values():
            state.read_later[self._next] = _copy(layer_cache, int(state.batch.block_tables.max()) + 1)
        return stream

    def _layer_cache(self, model: CausalLM, cache: KVCache) -> AnyCache:
        """Return the cache with the shape of the next layer's cache."""
        kind = self._content(model).kind
        return next(layer for layer in cache.layers if cache_kind(layer) == kind)

    def _content(self, model: CausalLM) -> CacheContent:
        """Return the content of the next layer's cache."""
        return model.layer_caches[self._next - model.local_layers.start]

    @contextmanager
    def _fast_methods(self) -> Iterator[None]:
        layers = [module for module in self._model.layers[self._next].modules() if isinstance(module, Linear)]
        floats = [layer.method for layer in layers]
        for layer in layers:
            layer.method = fast_method(layer)
        try:
            yield
        finally:
            for layer, method in zip(layers, floats, strict=True):
                layer.method = method

    @torch.inference_mode()
    def observe_head(self, linears: list[str], statistics: Statistics) -> ActivationStats:
        """Return the statistics of the head's inputs, after the last layer."""
        group, start = None, perf_counter()
        for state in self._states[1:]:
            x = self._model.finish(state.stream)  # [T, E]
            group = group or ActivationStats(linears, None, x, statistics)
            group.add(x, self._samples_per_batch)
        assert group is not None
        self.batch_seconds += perf_counter() - start
        return group


def _copy(cache: AnyCache, num_blocks: int) -> LayerCache:
    """Return a copy of the first blocks of an attention layer's cache."""
    parts = attention_cache(cache)
    assert parts is not None
    keys, values = (
        replace(vectors, tensors=tuple(tensor[:num_blocks].clone() for tensor in vectors.tensors)) for vectors in parts
    )
    return keys, values


def fast_method(layer: Linear) -> LinearMethod:
    """Return a faster method for many rows if the CPU has a kernel for this layer, else the float layer's method."""
    weight = layer.weight.detach()
    packed = packed_method(layer, weight.dtype, weight.device)
    if packed is None:
        return layer.method
    packed.load({"weight": weight}, weight.dtype, weight.device)
    return packed


def _absmax(cache: PagedVectors, slots: Tensor) -> Tensor:
    """Return the largest magnitude per head, [G] float32, in these slots of an unquantised KV cache.

    It is 0 if the cached vectors have no channels.
    """
    vectors = cache.tensors[0].flatten(0, 1)[slots]  # [T, G, D]
    return vectors.abs().amax((0, 2)).float() if vectors.shape[2] else vectors.new_zeros(vectors.shape[1]).float()


class _AllObserved(Exception):
    """Ends a layer's computation: its output is not needed."""


class _InputObserver:
    """Hooks that group linear layers by their input tensor. The name of a group is the name of its first layer.

    They raise _AllObserved when they have seen the inputs of all layers `last`, unless it is empty.
    """

    def __init__(self, samples_per_batch: int, statistics: Statistics, collects: bool, last: Sequence[str]) -> None:
        self.groups: dict[str, ActivationStats] = {}
        self._collects = collects
        self._num_samples = samples_per_batch
        self._statistics = statistics
        self._last, self._missing = set(last), set(last)
        # By id of the tensor: the group's first layer, or the norm that made it. The tensors are kept alive so that ids
        # stay unique.
        self._first_layers: dict[int, tuple[str, Tensor]] = {}
        self._norms: dict[int, tuple[str, Tensor]] = {}

    @contextmanager
    def hooked(self, layer: nn.Module, linears: Sequence[str], norms: Sequence[str]) -> Iterator[None]:
        """Observe these linear layers of a decoder layer, and its `norms` (if it has them), within the context."""
        modules = dict(layer.named_modules())
        hooks = [modules[name].register_forward_pre_hook(self.input_of(name)) for name in linears]
        hooks += [modules[name].register_forward_hook(self.output_of(name)) for name in norms if name in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def forget(self) -> None:
        self._first_layers.clear()
        self._norms.clear()
        self._missing = set(self._last)

    def output_of(self, name: str) -> Callable[..., None]:
        def remember(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, Tensor]) -> None:
            normed = output[0] if isinstance(output, tuple) else output
            self._norms[id(normed)] = name, normed

        return remember

    def input_of(self, name: str) -> Callable[..., None]:
        def observe(module: Linear, inputs: tuple[Tensor, Batch | None]) -> None:
            x, _ = inputs
            if id(x) not in self._first_layers:
                self._first_layers[id(x)] = name, x
                row_parallel = module.row_parallel
                # RowParallelReduce is never calibrated, because its sums depend on the number of ranks.
                assert not isinstance(row_parallel, RowParallelReduce)
                gathered = x if row_parallel is None else row_parallel.observe_inputs(x)
                if not self._collects:
                    return
                if name not in self.groups:
                    norm, _ = self._norms.get(id(x), (None, x))
                    self.groups[name] = ActivationStats([], norm, gathered, self._statistics)
                self.groups[name].linears += [name] * (name not in self.groups[name].linears)
                self.groups[name].add(gathered, self._num_samples)
            if self._collects:
                group = self.groups[self._first_layers[id(x)][0]]
                group.linears += [name] * (name not in group.linears)
            self._missing.discard(name)
            if self._last and not self._missing:
                raise _AllObserved

        return observe

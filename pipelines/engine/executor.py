"""Runs a model on batches over its KV cache."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from kernels.all_finite import all_finite
from kernels.cuda_graph import GraphPool
from kernels.threads import threads
from models.adapters import has_adapters
from models.batch import Batch, KVCache, attention_cache, layer_states
from models.causal_lm import CausalLM
from models.layers.attention import Heads
from pipelines.engine.graph_steps import GraphSteps
from pipelines.engine.recorded_steps import RecordedSteps
from pipelines.engine.steps import StepOutputs, Steps

MAX_RECORDED_TOKENS = 16  # largest decode step that is recorded; operator calls cost little in larger steps
# The operator calls of a prompt step take 0.6 ms at any length. A prompt step is recorded if its number of tokens times
# the bytes of the weights is at most this number. Prompts of models/tiny in float32 are recorded up to 97 tokens, which
# take 3 ms and 4 MB of intermediate results. Prompts of a model of 1.1 billion parameters are never recorded.
MAX_RECORDED_BYTES = 2**30
# How often a shape is computed before it is recorded. A recording costs as much as the operator calls of a step, and most
# prompt lengths do not repeat.
DECODES_BEFORE_RECORDING, PROMPTS_BEFORE_RECORDING = 1, 8

Result = TypeVar("Result")


class Operation(Generic[Result]):
    """A computation that all ranks of a model run together.

    Subclasses are frozen dataclasses, because rank 0 sends them to the workers as messages.
    """

    def compute(self, executor: "Executor") -> Result:
        """Compute this rank's share. The last pipeline stage returns the result."""
        raise NotImplementedError


class Executor:
    """Computes steps eagerly, from recordings on a CPU, or as CUDA graphs.

    `execute`, `run` and `begin` compute on all ranks; `step`, `compute` and `forward` compute this rank's share.
    """

    num_microbatches = 1
    """Number of steps that should be in flight at once."""

    def __init__(
        self, model: CausalLM, cache: KVCache, num_graph_sequences: int, table_width: int, decode_threads: int | None
    ) -> None:
        """`num_graph_sequences`: on a GPU, decode steps of up to this number of sequences are captured now.

        `table_width`: columns of the block tables of captured steps. `decode_threads`: CPU threads of decode steps; None:
        all. On a CPU, steps are recorded when their shape repeats.
        """
        self._table_width, self._decode_threads = table_width, decode_threads
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.decode_steps: Steps = self.compute
        self.adapted_steps: Steps = self.compute  # on a GPU, decode steps with adapters
        self.prompt_steps: Steps = self.compute  # separate, so that the many prompt lengths do not evict decode steps
        if self.device.type == "cpu":
            max_tokens = int(MAX_RECORDED_BYTES / model.step_weight_bytes(1))
            self.decode_steps = RecordedSteps(self.compute, MAX_RECORDED_TOKENS, DECODES_BEFORE_RECORDING)
            self.adapted_steps = self.decode_steps
            self.prompt_steps = RecordedSteps(self.compute, max_tokens, PROMPTS_BEFORE_RECORDING)
        elif num_graph_sequences:
            sizes = num_graph_sequences, table_width, model.num_prompt_features
            graphs = partial(
                GraphSteps,
                is_recurrent=model.config.capabilities.is_recurrent,
                is_windowed=cache.num_window_blocks > 0,
            )
            self.decode_steps = graphs(self.compute, GraphPool().capture, *sizes, self.device)
            if has_adapters(model):
                self.adapted_steps = graphs(self.compute, GraphPool().capture, *sizes, self.device, with_adapters=True)

    def stop_recording(self) -> None:
        """Compute every step eagerly from now on. A recorded step reads the weights of its recording."""
        self.decode_steps = self.adapted_steps = self.prompt_steps = self.compute

    def draft_executor(self, model: CausalLM, cache: KVCache, num_graph_sequences: int) -> "Executor":
        """Return an executor for a draft model whose cache has the same blocks."""
        return Executor(model, cache, num_graph_sequences, self._table_width, self._decode_threads)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored: parameters, and the buffers of packed weights."""
        return sum(tensor.nbytes for tensor in itertools.chain(self.model.parameters(), self.model.buffers()))

    def step_weight_bytes(self, num_sequences: int) -> float:
        return self.model.step_weight_bytes(num_sequences)

    @property
    def other_ranks_peak_bytes(self) -> int:
        """Sum of the peak bytes of the other ranks' processes."""
        return 0

    @property
    def kv_bytes_per_token(self) -> int:
        return self.cache.bytes_per_token

    @property
    def cache_states(self) -> dict[str, Tensor]:
        """The recurrent states [P, *] of this process's layers, by name."""
        return {
            f"layers.{number}.state.{i}": tensor
            for number, layer in zip(self.model.local_layers, self.cache.layers, strict=False)
            for i, tensor in enumerate(layer_states(layer))
        }

    @property
    def cache_tensors(self) -> dict[str, tuple[Tensor, Heads]]:
        """The cache's tensors [N, B, G, *] and the heads of each, by name.

        Names contain the layer's number in the whole model. A layer that only drafts tokens is left out.
        """
        layers = zip(self.model.local_layers, self.cache.layers, self.model.layer_caches, strict=False)
        return {
            f"layers.{number}.{name}.{part}": (tensor, content.heads)
            for number, layer, content in layers
            if content.heads is not None
            for name, vectors in zip(("keys", "values"), attention_cache(layer) or (), strict=True)
            for part, tensor in enumerate(vectors.tensors)
        }

    def prompt_features(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the features of the prompt, which the model reads in every step (`CausalLM.prompt_features`).

        Raises UserError for a prompt that the model cannot take.
        """
        return self.model.prompt_features(token_ids)

    def on_device(self, batch: Batch) -> Batch:
        """Return the batch on the model's device, without waiting for a GPU."""
        if batch.numbers.device.type == self.device.type:
            return batch
        return Batch(batch.numbers.pin_memory().to(self.device, non_blocking=True), batch.shape)

    def execute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        """Compute the batch's output rows. Does not wait for a GPU. The next call overwrites the rows.

        `token_ids`, int64 [T] on the model's device, replaces the batch's token ids.
        """
        return self.step(batch, token_ids)

    def run(self, operation: Operation[Result]) -> Result:
        """Compute an operation. The next call may overwrite its result."""
        return operation.compute(self)

    def begin(self, operation: Operation[Result]) -> Callable[[], Result]:
        """Begin an operation, and return a function that waits for its result.

        If `num_microbatches` is more than 1, later operations do not overwrite the result.
        """
        result = self.run(operation)
        return lambda: result

    def step(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        """Compute a step as its shape allows: from a recording, as a CUDA graph, or eagerly."""
        decodes = batch.shape.num_tokens == batch.shape.num_outputs
        with threads(self._decode_threads if decodes else None):
            if not decodes:
                return self.prompt_steps(batch, token_ids)
            return (self.adapted_steps if batch.shape.num_adapted else self.decode_steps)(batch, token_ids)

    def compute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        """Compute a step eagerly, operator by operator."""
        batch = self.on_device(batch)
        if token_ids is not None:
            batch.token_ids.copy_(token_ids)
        hidden = self.forward(batch)
        logits = self.model.logits(hidden, batch)
        return StepOutputs(hidden, logits, all_finite(logits))

    def forward(self, batch: Batch) -> Tensor:
        """Run the model's layers: compute hidden states [R, E] of the batch's output rows, in the model's dtype."""
        with threads(None):
            return self.model(self.on_device(batch), self.cache)

    def slice_local_layers(self, all_layers: Tensor) -> Tensor:
        """Return the slice [L', *] of `all_layers` [L, *] that belongs to this pipeline stage."""
        return all_layers[self.model.local_layers.start : self.model.local_layers.stop]

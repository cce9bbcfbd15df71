"""Runs a model on batches over its KV cache."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.all_finite import all_finite
from kernels.copy_blocks import copy_blocks
from kernels.cuda_graph import GraphPool
from kernels.kv_store import kv_store
from kernels.threads import threads
from models.adapters import has_adapters
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from models.layers.attention import Heads
from pipelines.engine.faults import not_finite
from pipelines.engine.graph_steps import GraphSteps
from pipelines.engine.recorded_steps import RecordedSteps
from pipelines.engine.steps import StepOutputs, Steps

MAX_RECORDED_TOKENS = 16  # of a decode step: in larger steps the cost of the calls is negligible
# The operator calls of a prompt step take 0.6 ms at any length. A prompt step is recorded if its tokens times the bytes
# of weights are at most this number: with models/tiny in float32 up to 97 tokens, which take 3 ms and 4 MB of
# intermediate results; with 1.1 B parameters never.
MAX_RECORDED_BYTES = 2**30
# Steps of a shape before it is recorded. Recording costs as much as the calls, and most prompt lengths do not repeat.
DECODES_BEFORE_RECORDING, PROMPTS_BEFORE_RECORDING = 1, 8


class Executor:
    """Computes steps eagerly, from recordings on a CPU, or as CUDA graphs; `execute` chooses."""

    num_microbatches = 1
    """Number of steps that should be in flight at once."""

    def __init__(
        self, model: CausalLM, cache: KVCache, num_graph_sequences: int, table_width: int, decode_threads: int | None
    ) -> None:
        """On a GPU, captures decode steps of up to `num_graph_sequences` sequences now.

        Their block tables have `table_width` columns. On a CPU, decode steps run on `decode_threads` threads (None:
        all), and repeated shapes are recorded.
        """
        self._table_width, self._decode_threads = table_width, decode_threads
        self.model = model
        self.cache = cache
        self._device = cache.tensors[0].device
        self.decode_steps: Steps = self.compute
        self.adapted_steps: Steps = self.compute  # on a GPU, decode steps with adapters
        self.prompt_steps: Steps = self.compute  # separate, so that many prompt lengths do not evict decode steps
        if self._device.type == "cpu":
            max_tokens = int(MAX_RECORDED_BYTES / model.step_weight_bytes(1))
            self.decode_steps = RecordedSteps(self.compute, MAX_RECORDED_TOKENS, DECODES_BEFORE_RECORDING)
            self.adapted_steps = self.decode_steps
            self.prompt_steps = RecordedSteps(self.compute, max_tokens, PROMPTS_BEFORE_RECORDING)
        elif num_graph_sequences:
            sizes = num_graph_sequences, table_width, model.num_prompt_features
            self.decode_steps = GraphSteps(self.compute, GraphPool().capture, *sizes, self._device)
            if has_adapters(model):
                capture = GraphPool().capture
                self.adapted_steps = GraphSteps(self.compute, capture, *sizes, self._device, with_adapters=True)

    def beside(self, model: CausalLM, cache: KVCache, num_graph_sequences: int) -> "Executor":
        """Return an executor of another model over a cache with the same blocks."""
        return Executor(model, cache, num_graph_sequences, self._table_width, self._decode_threads)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored: parameters, and the buffers of packed weights."""
        return sum(tensor.nbytes for tensor in itertools.chain(self.model.parameters(), self.model.buffers()))

    def step_weight_bytes(self, num_sequences: int) -> float:
        return self.model.step_weight_bytes(num_sequences)

    @property
    def peak_memory_of_others(self) -> int:
        """Sum of the peak bytes of the other ranks' processes."""
        return 0

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(tensor[0, 0].nbytes for tensor in self.cache.tensors)

    @property
    def cache_tensors(self) -> dict[str, tuple[Tensor, Heads]]:
        """The cache's tensors [N, B, G, *] and the heads of each, by name.

        Names contain the layer's number in the whole model. A layer that only drafts has no name.
        """
        return {
            f"layers.{number}.{name}.{part}": (tensor, heads)
            for number, layer, heads in zip(
                self.model.own_layers, self.cache.layers, self.model.attention_heads, strict=False
            )
            for name, vectors in zip(("keys", "values"), layer, strict=True)
            for part, tensor in enumerate(vectors.tensors)
        }

    def prompt_features(self, token_ids: list[int]) -> tuple[int, ...]:
        """Return the prompt's features that the model reads in every step.

        Raises UserError for a prompt that it cannot take.
        """
        return self.model.prompt_features(token_ids)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of the cache in all layers. `copies`: pairs of source and target."""
        if copies:
            sources, targets = torch.tensor(copies, device=self._device).T
            for keys, values in self.cache.layers:
                copy_blocks(keys, values, sources, targets)

    def on_device(self, batch: Batch) -> Batch:
        """Return the batch on the model's device, without waiting for a GPU."""
        if batch.numbers.device.type == self._device.type:
            return batch
        return Batch(batch.numbers.pin_memory().to(self._device, non_blocking=True), batch.shape)

    def execute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        """Compute the batch's output rows, without waiting for a GPU. The next call overwrites them.

        `token_ids`, int64 [T] on the model's device, replaces the batch's token ids.
        """
        return self._execute(batch, token_ids)

    def begin(self, batch: Batch) -> Callable[[], StepOutputs]:
        """Begin an `execute`, and return a function that waits for the outputs.

        With several microbatches no later step overwrites the outputs.
        """
        outputs = self.execute(batch)
        return lambda: outputs

    def _execute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        decodes = batch.shape.num_tokens == batch.shape.num_outputs
        with threads(self._decode_threads if decodes else None):
            if not decodes:
                return self.prompt_steps(batch, token_ids)
            return (self.adapted_steps if batch.shape.num_adapted else self.decode_steps)(batch, token_ids)

    def execute_whole(self, batch: Batch, whole: Batch) -> tuple[StepOutputs, Tensor]:
        """Return the outputs of `execute` and the hidden states [T, E] of all tokens.

        `whole` is the same batch with every token as an output row.
        """
        if batch.shape.num_outputs == batch.shape.num_tokens:
            outputs = self._execute(batch)
            return outputs, outputs.hidden
        batch, hidden = self.on_device(batch), self._hidden(whole)
        wanted = hidden[batch.output_rows]
        logits = self.model.logits(wanted, batch)
        return StepOutputs(wanted, logits, all_finite(logits)), hidden

    def compute(self, batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        """Compute a step eagerly, operator by operator."""
        batch = self.on_device(batch)
        if token_ids is not None:
            batch.token_ids.copy_(token_ids)
        hidden = self._hidden(batch)
        logits = self.model.logits(hidden, batch)
        return StepOutputs(hidden, logits, all_finite(logits))

    def hidden(self, batch: Batch) -> Tensor:
        """Compute hidden states [R, E] of the batch's output rows, in the model's dtype."""
        return self._hidden(batch)

    def _hidden(self, batch: Batch) -> Tensor:
        with threads(None):
            return self.model(self.on_device(batch), self.cache)

    def hidden_from(self, batch: Batch, embeddings: Tensor) -> Tensor:
        """Compute hidden states [R, E] as `hidden` does, but from `embeddings` [T, E] of the batch's tokens."""
        handle = self.model.embedding.register_forward_hook(lambda *_: embeddings)
        try:
            return self._hidden(batch)
        finally:
            handle.remove()

    def predict_ahead(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Compute hidden states [R, E] of the multi-token prediction layer, as `CausalLM.predict_ahead` does."""
        return self.model.predict_ahead(hidden, self.on_device(batch), self.cache)

    def clear_ahead(self) -> None:
        """Zero the keys and values of the multi-token prediction layer."""
        for stored in self.cache.layers[-1]:
            for tensor in stored.tensors:
                tensor.zero_()

    def own_layers(self, all_layers: Tensor) -> Tensor:
        """Return the slice [L', *] of `all_layers` [L, *] that belongs to this pipeline stage."""
        return all_layers[self.model.own_layers.start : self.model.own_layers.stop]

    def store(self, keys_and_values: Tensor, slots: list[int]) -> None:
        """Write keys and values [L, 2, P, G, D] of all layers and key heads of the model unchanged to slots of the
        cache.
        """
        places, own = torch.tensor(slots, device=self._device), self.own_layers(keys_and_values)
        for layer, heads, both in zip(self.cache.layers, self.model.attention_heads, own, strict=True):
            keys, values = heads.own_keys(both, axis=2)
            kv_store(keys, values, *layer, places)

    def write_blocks(self, name: str, content: Tensor, blocks: list[int]) -> None:
        """Write content [n, B, G, *], of all key heads of the model, into blocks of the cache tensor of this name.

        Does nothing if this pipeline stage does not have the tensor.
        """
        if name in self.cache_tensors:
            tensor, heads = self.cache_tensors[name]
            tensor[blocks] = heads.own_keys(content, axis=2).to(self._device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] of hidden states [R, E]. Raises UserError if a logit is not finite."""
        logits = self.unchecked_logits(hidden)
        if not all_finite(logits).all():
            raise not_finite()
        return logits

    def unchecked_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V] of hidden states [R, E]."""
        return self.model.logits(hidden)

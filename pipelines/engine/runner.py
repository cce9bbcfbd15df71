"""Runs a model on batches over its cache."""

import itertools

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.all_finite import all_finite
from kernels.copy_blocks import copy_blocks
from kernels.cuda_graph import GraphPool
from kernels.threads import threads
from models.batch import Batch, KVCache
from models.causal_lm import CausalLM
from pipelines.engine.captured_steps import CapturedSteps, Outputs
from pipelines.engine.gpu_batch import to_gpu
from pipelines.engine.padded_decode import PaddedDecodeSteps

MAX_CAPTURED_SEQUENCES = 16  # of a decode step: larger ones take so long that the calls do not count
# The calls of a prompt take 0.6 ms, however long it is. It is captured where its tokens times the bytes of weights are no more than this:
# with models/tiny in float32 up to 97 tokens, which take 3 ms and 4 MB of intermediate results; with 1.1 B parameters never.
MAX_CAPTURED_BYTES = 2**30
PROMPTS_BEFORE_CAPTURE = 8  # of one shape: to capture costs as much as their calls, and most lengths do not come again


class Runner:
    def __init__(
        self, model: CausalLM, cache: KVCache, num_graph_sequences: int, table_width: int, decode_threads: int | None
    ) -> None:
        """On a GPU, decode steps of up to `num_graph_sequences` are captured now, with tables of the width that a sequence may need. On a
        CPU decode steps have `decode_threads`, or as many as all, and what comes again is captured when it does."""
        self._decode_threads = decode_threads
        self.model = model
        self.cache = cache
        self._device = cache.tensors[0].device
        self._decode_steps: CapturedSteps | PaddedDecodeSteps | None = None
        self._prompt_steps: CapturedSteps | None = None  # apart: many lengths of prompts push no decode step out
        if self._device.type == "cpu":
            max_tokens = int(MAX_CAPTURED_BYTES / self.step_weight_bytes(1))
            self._decode_steps = CapturedSteps(self._compute, MAX_CAPTURED_SEQUENCES)
            self._prompt_steps = CapturedSteps(self._compute, max_tokens, times_before=PROMPTS_BEFORE_CAPTURE)
        elif num_graph_sequences:
            sizes = num_graph_sequences, table_width, model.num_prompt_marks
            self._decode_steps = PaddedDecodeSteps(self._forward, GraphPool(), *sizes, self._device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are held: parameters, and the buffers that stand for them where they are packed."""
        return sum(tensor.nbytes for tensor in itertools.chain(self.model.parameters(), self.model.buffers()))

    def step_weight_bytes(self, num_sequences: int) -> float:
        """Bytes of weights that a decode step reads."""
        return self.model.step_weight_bytes(num_sequences)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return sum(tensor[0, 0].nbytes for tensor in self.cache.tensors)

    def mark_prompt(self, token_ids: list[int]) -> tuple[int, ...]:
        return self.model.mark_prompt(token_ids)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of the cache in all layers, from and to."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.cache.tensors[0].device).T
            for keys, values in self.cache.layers:
                copy_blocks(keys, values, sources, targets)

    def on_device(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return batch if batch.numbers.device.type == self._device.type else to_gpu(batch, self._device)

    def run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states [R, E] and logits [R, V] of the batch's output rows, in the model's dtype, until the next call.

        Raises UserError where a logit is not finite.
        """
        hidden, logits, finite = self.launch(batch)
        check_finite(finite)
        return hidden, logits

    def launch(self, batch: Batch, token_ids: Tensor | None = None) -> Outputs:
        """The same without waiting for a GPU, so that nobody knows yet whether logits are finite.

        `token_ids` [T], on the model's device, take the place of the batch's.
        """
        decodes = batch.shape.num_tokens == batch.shape.num_sequences == batch.shape.num_outputs
        with threads(self._decode_threads if decodes else None):
            return self._launch(batch, self._decode_steps if decodes else self._prompt_steps, token_ids)

    def _launch(
        self, batch: Batch, steps: CapturedSteps | PaddedDecodeSteps | None, token_ids: Tensor | None
    ) -> Outputs:
        if isinstance(steps, PaddedDecodeSteps) and steps.hold(batch.shape.num_sequences):
            return steps.run(batch, token_ids)
        if token_ids is not None:
            batch = self.on_device(batch)
            batch.token_ids.copy_(token_ids)
        return steps.run(batch) if isinstance(steps, CapturedSteps) else self._compute(batch)

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, logits, and whether these are all finite."""
        hidden, logits = self._forward(batch)
        return hidden, logits, all_finite(logits)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(batch)
        return hidden, self.model.logits(hidden)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states [R, E] of the batch's output rows, in the model's dtype."""
        return self.model(self.on_device(batch), self.cache)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, E]. Raises UserError where one is not finite."""
        logits = self.model.logits(hidden)
        check_finite(all_finite(logits))
        return logits


def check_finite(finite: Tensor | bool) -> None:
    """Raises UserError where they are not."""
    if not finite:
        remedy = "the weights are damaged, or model.dtype=float16 is too small for them: try model.dtype=float32"
        raise UserError(f"the model's logits are not finite: {remedy}")

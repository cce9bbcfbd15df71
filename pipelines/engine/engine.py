"""The loop: plan, build, run, sample, commit."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import DecodeConfig
from models.batch import KVCache
from models.registry import CausalLM
from models.tokenizer import Tokenizer
from pipelines.engine.batch import build_batch
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.request import (
    Completion,
    ContextLimit,
    FinishReason,
    Output,
    Request,
    Sequence,
    check_max_length,
    resolve_sampling_params,
)
from pipelines.engine.runner import Runner
from pipelines.engine.sampler import sample, token_logprobs
from pipelines.engine.scheduler import Scheduler, StepPlan


class Engine:
    """Runs requests over one model and one pool of KV blocks. Not for several threads at once.

    >>> requests = [engine.request(0, [1, 403, 407], DecodeConfig(max_new_tokens=8))]
    >>> [output.token_ids for output in engine.generate(requests)]
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        tokenizer: Tokenizer | None,
        context: ContextLimit,
        eos_token_ids: frozenset[int],
        max_num_sequences: int,
        max_batched_tokens: int,
    ) -> None:
        num_blocks, self._block_size = cache.keys[0].shape[:2]
        self.device, self.dtype = cache.keys[0].device, cache.keys[0].dtype
        self.context = context
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(BlockManager(num_blocks, self._block_size), max_num_sequences, max_batched_tokens)
        self._shape = model.config
        self.vocab_size = model.config.vocab_size
        self._eos_token_ids = eos_token_ids
        self.runner = Runner(model, cache)
        self.num_generated_tokens = 0  # by all requests so far

    def resolve(self, decode: DecodeConfig) -> DecodeConfig:
        """The settings with what the checkpoint's generation_config.json says where they say nothing."""
        return decode

    def request(
        self, id: int, prompt_token_ids: list[int], decode: DecodeConfig, sink: Callable[[str], None] | None = None
    ) -> Request:
        """A checked request. Raises UserError for ids outside the vocabulary and for lengths that do not fit."""
        if not prompt_token_ids:
            raise UserError("the prompt has no tokens, and the tokenizer no BOS to begin with")
        self._check_ids("prompt token id", prompt_token_ids)
        self.check(decode)
        if self._shape.keys_depend_on_length:  # then the same tokens have other keys in a longer prompt
            decode = replace(decode, prefix_cache=False)
        params = resolve_sampling_params(decode, len(prompt_token_ids), self.context, self._eos_token_ids)
        blocks, num_tokens = self.scheduler.block_manager, len(prompt_token_ids) + params.max_new_tokens
        if blocks.num_blocks_for(num_tokens) > blocks.num_blocks:
            capacity = blocks.num_blocks * blocks.block_size
            remedy = "raise device.kv_cache_memory, or ask for fewer new tokens"
            raise UserError(f"prompt and new tokens are {num_tokens}, but the KV cache holds {capacity}: {remedy}")
        return Request(id, prompt_token_ids, params, sink)

    def _check_ids(self, what: str, ids: list[int]) -> None:
        if wrong := [id for id in ids if not 0 <= id < self.vocab_size]:
            raise UserError(f"{what} {wrong[0]} is not in the vocabulary: give ids from 0 to {self.vocab_size - 1}")

    def check(self, decode: DecodeConfig) -> None:
        """Raises UserError for settings that no prompt could be run with."""
        check_max_length(decode, self.context)
        self._check_ids("stop token id", decode.stop_token_ids)
        if decode.stop and self.tokenizer is None:
            remedy = "give decode.stop_token_ids, or model.tokenizer=PATH"
            raise UserError(f"decode.stop={decode.stop} needs a tokenizer: {remedy}")

    def generate(
        self,
        requests: Iterable[Request],
        max_num_sequences: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> Iterator[Output]:
        """Outputs as they finish. Requests are taken from the iterable when a place is free; closing the iterator cancels the rest."""
        limit = min(max_num_sequences or self.scheduler.max_num_sequences, self.scheduler.max_num_sequences)
        source = iter(requests)
        alive: list[Sequence] = []
        try:
            while True:
                while len(alive) < limit and (request := next(source, None)) is not None:
                    alive.append(self.add(request))
                if not alive:
                    return
                self.step()
                finished = [sequence for sequence in alive if sequence.finish_reason]
                alive = [sequence for sequence in alive if not sequence.finish_reason]
                yield from map(_output, finished)
                on_step()  # after the outputs, so that nothing is lost if it raises
        finally:
            for sequence in alive:
                if not sequence.finish_reason:  # some may have finished in the very step that failed
                    self.scheduler.remove(sequence)

    def add(self, request: Request) -> Sequence:
        sequence = Sequence(request, self._detokenizer(request), list(request.prompt_token_ids))
        self.scheduler.add(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass over everything that runs; every sequence whose last token is in it gets a new one."""
        plan = self.scheduler.plan()
        batch = build_batch(plan, self._block_size, self.device)
        logits = self.runner.run(batch)
        sampled = [item.sequence for item in plan.scheduled if item.samples]
        tokens = sample(logits, sampled)
        self._commit(plan, sampled, logits, tokens)

    def _commit(self, plan: StepPlan, sampled: list[Sequence], logits: Tensor, tokens: list[int]) -> None:
        for item in plan.scheduled:
            self.scheduler.commit(item)
        for sequence, token in zip(
            sampled, tokens, strict=True
        ):  # all of them before any sink is called, which may raise
            sequence.token_ids.append(token)
        self.num_generated_tokens += len(tokens)
        for row, (sequence, token) in enumerate(zip(sampled, tokens, strict=True)):
            if (num_top := sequence.request.params.logprobs) is not None:
                sequence.logprobs.append(token_logprobs(logits[row], token, num_top))
            sequence.finish_reason = _advance(sequence, token)
            if sequence.finish_reason:
                self.scheduler.remove(sequence)

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        skip = request.params.skip_special_tokens
        return Detokenizer(lambda ids: tokenizer.decode(ids, skip), request.prompt_token_ids, request.params.stop)


def _advance(sequence: Sequence, token: int) -> FinishReason | None:
    """Turn the new token into text, hand it to the sink, and say whether the sequence ends here."""
    params = sequence.request.params
    may_stop = sequence.num_output_tokens >= params.min_new_tokens
    piece, stopped = "", False
    # The text of a stop token, like that of a stop string, is left out.
    if sequence.detokenizer and token not in params.stop_token_ids:
        piece, stopped = sequence.detokenizer.add(token, may_stop)
    reason = None
    if stopped or (may_stop and token in params.stop_token_ids | params.eos_token_ids):
        reason = FinishReason.stop
    elif sequence.num_output_tokens == params.max_new_tokens:
        reason = FinishReason.length
    if reason and sequence.detokenizer and not stopped:
        piece += sequence.detokenizer.flush()
    if piece and sequence.request.sink:
        sequence.request.sink(piece)
    return reason


def _output(sequence: Sequence) -> Output:
    assert sequence.finish_reason is not None
    completion = Completion(
        token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
        text=sequence.detokenizer.text if sequence.detokenizer else None,
        finish_reason=sequence.finish_reason,
        logprobs=sequence.logprobs if sequence.request.params.logprobs is not None else None,
    )
    return Output(sequence.request.id, [completion], sequence.num_prompt_tokens, sequence.num_cached_tokens or 0)

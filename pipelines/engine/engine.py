"""The loop: plan, build, run, choose, commit."""

from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.batch import KVCache
from models.causal_lm import CausalLM
from models.tokenizers import Tokenizer
from pipelines.engine.batch import build_batch, whole_batch
from pipelines.engine.beam_search import BeamSearch
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.contrastive_search import ContrastiveSearch
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.faults import belongs_to_request
from pipelines.engine.lookahead import Lookahead
from pipelines.engine.request import (
    ContextLimit,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    Search,
    Sequence,
    SequenceGroup,
    TokenLogprobs,
    check_max_length,
    resolve_sampling_params,
)
from pipelines.engine.runner import Runner
from pipelines.engine.sampler import sample, token_logprobs
from pipelines.engine.scheduler import Scheduler, StepPlan
from pipelines.engine.stopping import completion_of, extend_text, send_text

LOGPROB_ROWS = 256  # rows of prompt log probabilities at a time: float32 copies of them stay small


class Engine:
    """Runs requests over one model and one pool of KV blocks. Not for several threads at once.

    >>> requests = [engine.request(0, [1, 403, 407], DecodeConfig(max_new_tokens=8))]
    >>> [output.completions[0].token_ids for output in engine.generate(requests)]
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        tokenizer: Tokenizer | None,
        context: ContextLimit,
        eos_token_ids: frozenset[int],
        decode_defaults: dict[str, Any],
        max_num_requests: int,
        max_batched_tokens: int,
        num_graph_sequences: int = 0,
        decode_threads: int | None = None,
    ) -> None:
        """`decode_defaults`: settings of DecodeConfig that hold where a request says nothing. `num_graph_sequences`: the most in a decode
        step that is captured as a CUDA graph, where there is a GPU. `decode_threads`: of such steps on a CPU, if not those of all."""
        num_blocks, self._block_size = cache.tensors[0].shape[:2]
        self.device, self.dtype = cache.tensors[0].device, cache.dtype
        self.context = context
        self.tokenizer = tokenizer
        self._shape = model.config
        self.scheduler = Scheduler(
            BlockManager(num_blocks, self._block_size),
            max_num_requests,
            max_batched_tokens,
            self._shape.needs_whole_prompt,
            self._shape.key_border,
        )
        self.vocab_size = model.config.vocab_size
        self._eos_token_ids = eos_token_ids
        self._decode_defaults = decode_defaults
        self._decode_threads = decode_threads
        self.run_over(model, cache, num_graph_sequences)
        self.num_generated_tokens = 0  # by all requests so far

    def run_over(self, model: CausalLM, cache: KVCache, num_graph_sequences: int = 0) -> None:
        """Compute with this model, or this cache, of the same number of blocks, from now on: captured steps know the old ones."""
        blocks = self.scheduler.block_manager
        width = min(blocks.num_blocks, blocks.num_blocks_for(self.context.num_tokens))
        self.runner = Runner(model, cache, num_graph_sequences, width, self._decode_threads)
        self._lookahead = Lookahead(self.scheduler, self.runner) if self.device.type == "cuda" else None

    def resolve(self, decode: DecodeConfig) -> DecodeConfig:
        """The settings, complete: what the checkpoint suggests, or a neutral value, where they say nothing."""
        return decode.resolved(self._decode_defaults)

    def request(
        self, id: int, prompt_token_ids: list[int], decode: DecodeConfig, sink: Callable[[str], None] | None = None
    ) -> Request:
        """A checked request. Raises UserError for ids outside the vocabulary and for lengths that do not fit."""
        if not prompt_token_ids:
            raise UserError("the prompt has no tokens, and the tokenizer no BOS to begin with")
        self._check_ids("prompt token id", prompt_token_ids)
        decode = self.resolve(decode)
        self.check(decode)
        if self._shape.keys_depend_on_length or self._shape.needs_whole_prompt:
            decode = replace(decode, prefix_cache=False)  # the same tokens have other keys in a longer prompt
        num_prompt, bad_words = len(prompt_token_ids), self._bad_words(decode.bad_words)
        params = resolve_sampling_params(decode, num_prompt, self.context, self._eos_token_ids, bad_words)
        if sink is not None and (params.num_beams > 1 or params.n > 1):
            which = f"num_beams={params.num_beams}" if params.num_beams > 1 else f"n={params.n}"
            raise UserError(
                f"decode.{which} cannot be streamed, because it has no single text that grows: give no streamer"
            )
        self._check_size(params, num_prompt)
        return Request(id, prompt_token_ids, params, sink, self.runner.mark_prompt(prompt_token_ids))

    def _check_ids(self, what: str, ids: Iterable[int]) -> None:
        if wrong := [id for id in ids if not 0 <= id < self.vocab_size]:
            raise UserError(f"{what} {wrong[0]} is not in the vocabulary: give ids from 0 to {self.vocab_size - 1}")

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokenizer writes it, alone and after a space."""
        if not words:
            return ()
        assert self.tokenizer is not None
        written = [self.tokenizer.encode(text, False) for word in words for text in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(ids) for ids in written if ids))

    def _check_size(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises UserError for a request that could never run, because the pool or a step is too small for it."""
        blocks, width = self.scheduler.block_manager, params.num_sequences
        if self.scheduler.most_blocks(params, num_prompt_tokens) > blocks.num_blocks:
            num_tokens = num_prompt_tokens + params.max_new_tokens
            what = f"prompt and new tokens are {num_tokens}" + (f", in {width} sequences" if width > 1 else "")
            capacity = blocks.num_blocks * blocks.block_size
            remedy = "raise device.kv_cache_memory, or ask for fewer new tokens"
            raise UserError(f"{what}, but the KV cache holds {capacity}: {remedy}")
        most = self.scheduler.max_batched_tokens
        if self._shape.needs_whole_prompt and num_prompt_tokens + params.max_new_tokens > most:
            raise UserError(
                f"prompt and new tokens are {num_prompt_tokens + params.max_new_tokens}, but this model's prompts cannot be cut "
                f"and device.max_batched_tokens={most}: raise it, or ask for fewer new tokens"
            )
        if width > most:
            limit = f"device.max_batched_tokens={most}"
            raise UserError(f"the request has {width} sequences, but {limit}: every one needs a token of each step")

    def check(self, decode: DecodeConfig) -> None:
        """Raises UserError for settings that no prompt could be run with."""
        check_max_length(decode, self.context)
        self._check_ids("stop token id", decode.stop_token_ids)
        self._check_ids("allowed token id", decode.allowed_token_ids)
        self._check_ids("logit_bias token id", decode.logit_bias or {})
        for name in ("stop", "bad_words"):
            if getattr(decode, name) and self.tokenizer is None:
                remedy = "give token ids instead, or model.tokenizer=PATH"
                raise UserError(f"decode.{name}={getattr(decode, name)} needs a tokenizer: {remedy}")

    def generate(
        self,
        requests: Iterable[Request],
        max_num_requests: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> Generator[Output, None, None]:
        """Outputs as they finish. Requests are taken from the iterable when a place is free; closing the iterator cancels the rest.

        A request that fails on its way is an output with its `error`. What does not belong to one request is raised.
        """
        limit = min(max_num_requests or self.scheduler.max_num_requests, self.scheduler.max_num_requests)
        source = iter(requests)
        alive: list[SequenceGroup] = []
        try:
            while True:
                while len(alive) < limit and (request := next(source, None)) is not None:
                    try:
                        alive.append(self.add(request))
                    except BaseException as error:
                        if not belongs_to_request(error):
                            raise
                        yield Output(request.id, [], len(request.prompt_token_ids), 0, error=error)
                if not alive:
                    return
                if any(group.sequences for group in alive):  # the steps of another call may have finished them all
                    self.step()
                finished = [group for group in alive if not group.sequences]
                alive = [group for group in alive if group.sequences]
                yield from map(_output, finished)
                on_step()  # after the outputs, so that nothing is lost if it raises
        finally:
            for group in alive:
                if group.sequences:  # some may have finished in the very step that failed
                    self.scheduler.cancel(group)

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request: `step` until its `sequences` are none, then its `completions` are all there; or `scheduler.cancel` it."""
        params = request.params
        search: Search | None = None
        wants_prompt = params.prompt_logprobs is not None or params.penalty_alpha > 0
        origin = Sequence(
            request,
            self._detokenizer(request),
            list(request.prompt_token_ids),
            first_wanted=0 if wants_prompt else None,
        )
        if params.num_beams > 1:
            search = BeamSearch(params, origin.detokenizer)
        elif params.penalty_alpha > 0:
            search = ContrastiveSearch()
        group = SequenceGroup(request, origin, search)
        self.scheduler.add(group)
        return group

    @torch.inference_mode()
    def step(self) -> None:
        """One forward pass over everything that runs; the groups that are computed to their last tokens get new ones."""
        launched = self._lookahead.take() if self._lookahead else None
        if launched is None:
            plan = self.scheduler.plan()
            self.runner.copy_blocks(plan.copies)
            if self._lookahead is None or not self._lookahead.fits(plan):
                self._compute(plan)
                return
            launched = self._lookahead.launch(plan)
        assert self._lookahead
        self._accept(self._lookahead.results(launched))

    def _compute(self, plan: StepPlan) -> None:
        """A step whose results are waited for."""
        hidden, logits = self.runner.run(build_batch(plan, self._block_size))  # [R, E], [R, V]
        self.scheduler.commit(plan)
        rows = self._observe(plan, hidden, logits)
        ready = [group for group in plan.ready if not group.error]
        self._sample([group for group in ready if not group.search], rows, logits)
        for group in ready:
            if group.search:
                self._advance(group, group.search, logits[[rows[sequence] for sequence in group.sequences]])

    def _fail(self, group: SequenceGroup, error: BaseException) -> None:
        """End this request alone. Raises the exception again where it does not belong to one request."""
        if not belongs_to_request(error):
            raise error
        self.scheduler.cancel(group)
        group.error = error

    def num_at_once(self, num_tokens: int) -> int:
        """How many prompts of so many tokens `hidden_states` takes in one step."""
        blocks = self.scheduler.block_manager
        by_memory = blocks.num_free_blocks // blocks.num_blocks_for(num_tokens)
        return min(by_memory, self.scheduler.max_batched_tokens // num_tokens)

    @torch.inference_mode()
    def hidden_states(self, prompts: list[list[int]], num_outputs: list[int]) -> Tensor:
        """Hidden states [R, E] of the last `num_outputs` tokens of each prompt, computed in one step that nothing else is in.

        The prompts' keys and values are read from the cache, as those of requests are. No more than `num_at_once` prompts.
        """
        blocks = self.scheduler.block_manager
        tables = [blocks.allocate(blocks.num_blocks_for(len(prompt))) for prompt in prompts]
        try:
            marks = [self.runner.mark_prompt(prompt) for prompt in prompts]
            return self.runner.hidden(whole_batch(prompts, num_outputs, tables, marks, self._block_size))
        finally:
            for table in tables:
                blocks.free(table)

    @property
    def sees_later_tokens(self) -> bool:
        """Whether a prompt's tokens see later ones, so that they are not predicted from those before them."""
        return self._shape.needs_whole_prompt

    def _sample(self, groups: list[SequenceGroup], rows: dict[Sequence, int], logits: Tensor) -> None:
        """A token for each sequence of groups that do not search; those that end leave their group."""
        chosen = []
        for group in groups:
            if len(group.sequences) < group.request.params.n and group.num_output_tokens == 0:
                self._fork_samples(group, rows)
            chosen += [(group, sequence) for sequence in group.sequences]
        if not chosen:
            return
        indices = [rows[sequence] for _, sequence in chosen]
        wanted = logits if indices == list(range(logits.shape[0])) else logits[indices]
        try:
            tokens = sample(wanted, [sequence for _, sequence in chosen])
            logprobs = [_logprobs(wanted[i : i + 1], chosen[i][1], token) for i, token in enumerate(tokens)]
        except BaseException as error:
            if not belongs_to_request(error):
                raise
            if len(groups) == 1:
                self._fail(groups[0], error)
                return
            for group in groups:  # each alone shows whether the fault is its own
                self._sample([group], rows, logits)
            return
        for (_, sequence), steps in zip(chosen, logprobs, strict=True):
            sequence.logprobs += steps
        self._accept([(group, sequence, token) for (group, sequence), token in zip(chosen, tokens, strict=True)])

    def _advance(self, group: SequenceGroup, search: Search, logits: Tensor) -> None:
        """The next tokens of a group that searches."""
        try:
            continuations = search.advance(group, logits)
        except BaseException as error:
            self._fail(group, error)
            return
        for sequence in group.sequences:
            send_text(sequence)
        self.scheduler.branch(group, continuations)
        self.num_generated_tokens += 1

    def _accept(self, chosen: Collection[tuple[SequenceGroup, Sequence, int | None]]) -> None:
        """The sequences' next tokens, None where all were banned."""
        for _, sequence, token in chosen:
            if token is not None:  # all of them before any sink is called, which may raise
                sequence.token_ids.append(token)
        self.num_generated_tokens += len(chosen)
        for group, sequence, token in chosen:
            if group.error:  # another sample's
                continue
            try:
                reason = FinishReason.no_token if token is None else extend_text(sequence)
            except BaseException as error:
                self._fail(group, error)
                continue
            send_text(sequence)
            if reason:
                group.completions[sequence.sample] = completion_of(sequence, reason)
                self.scheduler.finish(group, sequence)

    def _observe(self, plan: StepPlan, hidden: Tensor, logits: Tensor) -> dict[Sequence, int]:
        """Keep what requests want of their prompts. Returns the row of each sequence's last token."""
        rows, end = {}, 0
        for item in plan.scheduled:
            begin, end = end, end + item.num_outputs
            rows[item.sequence] = end - 1
            group = item.group
            if group.error:
                continue
            try:
                if group.search:
                    group.search.observe(hidden[begin:end])
                if group.request.params.prompt_logprobs is not None:
                    _add_prompt_logprobs(group, item.sequence, logits[begin:end])
            except BaseException as error:
                self._fail(group, error)
        return rows

    def _fork_samples(self, group: SequenceGroup, rows: dict[Sequence, int]) -> None:
        """The prompt is computed: from here each sample goes its own way, from the same logits."""
        (first,) = group.sequences
        for i in range(1, group.request.params.n):
            fork = self.scheduler.fork(first)
            fork.sample = i
            rows[fork] = rows[first]
            group.sequences.append(fork)

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        tokenizer, params = self.tokenizer, request.params
        if tokenizer is None:
            return None
        skip = params.skip_special_tokens
        return Detokenizer(
            lambda ids: tokenizer.decode(ids, skip), request.prompt_token_ids, params.stop, params.include_stop
        )


def _logprobs(logits: Tensor, sequence: Sequence, token: int | None) -> list[TokenLogprobs]:
    """Of the token that was chosen from logits [1, V], if the request asks for them."""
    num_top = sequence.request.params.logprobs
    return [] if token is None or num_top is None else token_logprobs(logits, [token], num_top)


def _add_prompt_logprobs(group: SequenceGroup, sequence: Sequence, logits: Tensor) -> None:
    """From logits [P, V] of the sequence's P tokens that were computed last."""
    prompt, known = group.request.prompt_token_ids, group.prompt_logprobs
    first = sequence.num_computed_tokens - len(logits)
    logits = logits[max(0, len(known) - first) :]  # without what was known before a preemption
    targets = prompt[len(known) + 1 :][: len(logits)]
    for start in range(0, len(targets), LOGPROB_ROWS):
        chunk = targets[start : start + LOGPROB_ROWS]
        rows = logits[start : start + len(chunk)]
        known += token_logprobs(rows, chunk, group.request.params.prompt_logprobs or 0)


def _output(group: SequenceGroup) -> Output:
    return Output(
        request_id=group.request.id,
        completions=[completion for _, completion in sorted(group.completions.items())],
        num_prompt_tokens=len(group.request.prompt_token_ids),
        num_cached_tokens=group.num_cached_tokens or 0,
        prompt_logprobs=group.prompt_logprobs if group.request.params.prompt_logprobs is not None else None,
        error=group.error,
    )

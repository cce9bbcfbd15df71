"""The engine's step loop: plan, build the batch, execute, sample, commit."""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from models.batch import KVCache
from models.causal_lm import CausalLM
from models.tokenizers import Tokenizer
from pipelines.engine.adapters import Adapters
from pipelines.engine.batch import build_batch, prompt_batch
from pipelines.engine.beam_search import BeamSearch
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.choices import Choices, choose_tokens
from pipelines.engine.contrastive_search import ContrastiveSearch
from pipelines.engine.detokenizer import Detokenizer
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.executor import Executor
from pipelines.engine.faults import belongs_to_request
from pipelines.engine.lookahead import LaunchedStep, can_choose_ahead
from pipelines.engine.operations import CopyBlocks, Execute, ExecuteWithHidden, Hidden
from pipelines.engine.pooling import PromptPooling
from pipelines.engine.request import (
    Output,
    Pooling,
    Request,
    Search,
    Sequence,
    SequenceGroup,
    Sink,
)
from pipelines.engine.request_factory import RequestFactory
from pipelines.engine.sampler import choose
from pipelines.engine.scheduler import Scheduler, StepPlan
from pipelines.engine.speculation import Speculator
from pipelines.engine.steps import StepOutputs
from pipelines.engine.stopping import Piece, append_token, completion_of, take_piece
from pipelines.engine.top_p_window import verify

# Number of steps over which a microbatch spreads the token budget of its prompts. The other pipeline stages wait in the
# first and in the last of these steps.
MICROBATCH_STEPS = 4


class Engine:
    """Runs requests over one model and one pool of KV blocks. Not thread-safe.

    >>> requests = [engine.request(0, [1, 403, 407], DecodeConfig(max_new_tokens=8))]
    >>> [output.completions[0].token_ids for output in engine.generate(requests)]
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        adapters: Adapters | None = None,
        make_executor: Callable[[CausalLM, KVCache, int, int, int | None], Executor] = Executor,
    ) -> None:
        """`adapters`: the model's adapters that requests can name.

        `make_executor`: Executor, or a factory with the same arguments for an executor that runs the model with other
        ranks.
        """
        self.num_blocks, self.block_size = cache.tensors[0].shape[:2]
        self.device, self.dtype = cache.tensors[0].device, cache.dtype
        self.config, self.tokenizer = config, tokenizer
        self.vocab_size, self.capabilities = model.config.vocab_size, model.config.capabilities
        self.requests = RequestFactory(
            tokenizer, self.vocab_size, self.capabilities, config, self.num_blocks, self.block_size
        )
        blocks = BlockManager(self.num_blocks, self.block_size)
        self.adapters = adapters or Adapters(model, self.dtype, self.device)
        self.scheduler = Scheduler(
            blocks, config.max_num_requests, config.max_batched_tokens, self.capabilities, self.adapters.slots
        )
        self._make_executor = make_executor
        self.looks_ahead = self.device.type == "cuda"
        """Whether a step is launched before the previous step's tokens are known, if its plan allows it."""
        self.num_generated_tokens = 0  # by all requests so far
        self.num_computed_tokens = 0  # without drafts
        self.speculator = Speculator(self.scheduler)
        self.run_over(model, cache, config.num_graph_sequences)

    def run_over(self, model: CausalLM, cache: KVCache, num_graph_sequences: int = 0) -> None:
        """Use this model and this cache from now on.

        The cache must have as many blocks as the previous cache. Captured steps are dropped.
        """
        width = min(self.num_blocks, self.scheduler.block_manager.num_blocks_for(self.config.context.num_tokens))
        self.executor = self._make_executor(model, cache, num_graph_sequences, width, self.config.decode_threads)
        self._num_graph_sequences = num_graph_sequences
        self._launched: LaunchedStep | None = None  # the next step, launched before the CPU has its input tokens
        # Steps in flight. No group is in two of them.
        self._microbatches: deque[tuple[StepPlan, Callable[[], StepOutputs]]] = deque()

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load the LoRA adapter of a folder; it replaces an adapter of the same name.

        Raises UserError as `Adapters.load` does.
        """
        if self.adapters.load(name, Path(folder), self.scheduler.adapters_in_use):
            self.run_over(self.executor.model, self.executor.cache, self._num_graph_sequences)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Raises UserError if the name is unknown or a request uses the adapter."""
        self.adapters.unload(name, self.scheduler.adapters_in_use)

    @property
    def is_next_computed(self) -> bool:
        """Whether an earlier step computed the next step's outputs, for drafts that were accepted."""
        return self._launched is not None and self._launched.is_confirmed

    def request(
        self,
        id: int,
        prompt_token_ids: list[int],
        decode: DecodeConfig,
        sink: Sink | None = None,
        prediction_token_ids: list[int] | None = None,
        prefix: str | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Return a checked request.

        Raises UserError as `RequestFactory.make` and `Adapters.give` do, and for a prompt that the model cannot take.
        """
        request = self.requests.make(id, prompt_token_ids, decode, sink, prediction_token_ids, prefix)
        return self._with_adapter(request, adapter)

    def pooled_request(
        self,
        id: int,
        prompt_token_ids: list[int],
        pooling: Pooling,
        decode: DecodeConfig,
        prefix: str | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Return a checked request for the prompt's vector.

        Raises UserError as `RequestFactory.make_pooled` and `request` do.
        """
        return self._with_adapter(self.requests.make_pooled(id, prompt_token_ids, pooling, decode, prefix), adapter)

    def _with_adapter(self, request: Request, adapter: str | None) -> Request:
        if adapter is not None:
            request = self.adapters.give(request, adapter)
        self.executor.prompt_features(request.prompt_token_ids)
        return request

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no sequence owns and that are not pinned."""
        return self.scheduler.block_manager.num_free_blocks

    def pin(self, num_blocks: int) -> list[int]:
        """Allocate blocks permanently, at most `num_free_blocks`. Requests can use only the remaining blocks."""
        blocks = self.scheduler.block_manager.allocate(num_blocks)
        self.scheduler.block_manager.pin(blocks)
        self.requests = replace(self.requests, num_blocks=self.requests.num_blocks - num_blocks)
        return blocks

    def remember(self, blocks: list[int], hashes: Iterable[bytes]) -> None:
        """Add pinned blocks to the prefix cache under these hashes."""
        for block, value in zip(blocks, hashes, strict=True):
            self.scheduler.block_manager.remember(block, value)

    def find_cached_blocks(self, hashes: list[bytes]) -> list[int]:
        """Return the cached blocks that match the longest prefix of `hashes`."""
        return self.scheduler.block_manager.find_prefix(hashes)

    def generate(
        self,
        requests: Iterable[Request],
        max_num_requests: int | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> Generator[Output, None, None]:
        """Yield outputs as requests finish.

        Takes the next request when fewer than `max_num_requests` requests run. Closing the iterator cancels unfinished
        requests. A failed request yields an output with its `error`. An exception that one request did not cause is
        raised.
        """
        source = iter(requests)
        with closing(self.steps(lambda: next(source, None), max_num_requests)) as steps:
            for outputs in steps:
                yield from outputs
                on_step()  # after the outputs, so that no output is lost if it raises

    def steps(
        self, next_request: Callable[[], Request | Output | None], max_num_requests: int | None = None
    ) -> Generator[list[Output], None, None]:
        """Yield the finished outputs after each step, until nothing runs and there is no further request.

        `next_request` is called when fewer than `max_num_requests` requests run. It returns a request, the output of a
        refused request, or None if there is no request now. Errors and closing are as in `generate`.
        """
        limit = min(max_num_requests or self.config.max_num_requests, self.config.max_num_requests)
        alive: list[SequenceGroup] = []
        try:
            while True:
                while len(alive) < limit and (request := next_request()) is not None:
                    if isinstance(request, Output):
                        yield [request]
                        continue
                    try:
                        alive.append(self.add(request))
                    except BaseException as error:
                        if not belongs_to_request(error):
                            raise
                        yield [Output(request.id, [], len(request.prompt_token_ids), 0, error=error)]
                if not alive:
                    return
                if any(group.sequences for group in alive):  # the steps of another caller may have finished all groups
                    self.step()
                finished = [group for group in alive if not group.sequences]
                alive = [group for group in alive if group.sequences]
                yield [group.output() for group in finished]
        finally:
            for group in alive:
                if group.sequences:  # some groups may have finished in the step that failed
                    self.cancel(group)

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request.

        Call `step` until the group's `sequences` are empty, then take its `output`; or call `cancel`.
        """
        self.adapters.check(request.adapter)
        params, pooling = request.params, request.pooling
        origin = Sequence.begin(request, self._detokenizer(request))
        origin.prompt_features = self.executor.prompt_features(request.prompt_token_ids)
        if params.prompt_logprobs is not None or params.penalty_alpha > 0 or pooling in (Pooling.mean, Pooling.cls):
            origin.first_output_position = 0
        search: Search | None = None
        if params.num_beams > 1:
            search = BeamSearch(params, origin.detokenizer)
        elif params.penalty_alpha > 0:
            search = ContrastiveSearch()
        elif pooling:
            search = PromptPooling(pooling)
        group = SequenceGroup(request, origin, search)
        self.scheduler.add(group)
        return group

    @property
    def running(self) -> Collection[SequenceGroup]:
        """The admitted groups, in the order of admission."""
        return self.scheduler.running

    @property
    def waiting(self) -> Collection[SequenceGroup]:
        """The queued groups that are not running, in the order of the queue."""
        return self.scheduler.waiting

    def cancel(self, group: SequenceGroup) -> None:
        """End a running or waiting group."""
        self.scheduler.cancel(group)

    def fail_running(self, error: BaseException) -> None:
        """End all running groups with this error, after a failed step. Raises RuntimeError if blocks are lost."""
        for group in list(self.running):
            self.cancel(group)
            group.error = error
        self.scheduler.check_integrity()

    @torch.inference_mode()
    def step(self, max_tokens: int | None = None) -> None:
        """Run one step for the running groups. Append new tokens to the groups whose tokens are all computed.

        `max_tokens`: the step's token budget, as for `Scheduler.plan`.
        """
        step, self._launched = self._launched, None
        if step is None or not step.has_live_sequences():
            step = self._next_step(max_tokens)
            verify(step, self._fail)
        ahead = self._launch_ahead(step)
        choices = choose_tokens(step, self._fail)
        self.speculator.sampled()
        self.scheduler.commit(step.plan)
        self.num_computed_tokens += sum(item.num_new_tokens for item in step.plan.scheduled)
        self._launched = ahead
        self._accept(choices)
        self._launched = ahead or step.confirmed()

    def _next_step(self, max_tokens: int | None) -> LaunchedStep:
        """Begin a step in every free microbatch, then wait for the oldest step and return it.

        With drafts there is only one microbatch.
        """
        microbatches, executor = self._microbatches, self.executor
        num_microbatches = 1 if self.speculator.wants_drafts(self.scheduler.running) else executor.num_microbatches
        if num_microbatches > 1:
            share = self.config.max_batched_tokens // (num_microbatches * MICROBATCH_STEPS)
            max_tokens = share if max_tokens is None else min(max_tokens, share)
        while len(microbatches) < num_microbatches:
            plan = self.scheduler.plan(max_tokens, [plan for plan, _ in microbatches], num_microbatches)
            if plan.copies:
                executor.run(CopyBlocks(plan.copies))
            if num_microbatches == 1:
                return self._launch(self.speculator.extend(plan, max_tokens))
            if not plan.scheduled:
                break
            microbatches.append((plan, executor.begin(Execute(build_batch(plan, self.block_size)))))
        plan, outputs = microbatches.popleft()
        return LaunchedStep(plan, outputs())

    def _launch(self, plan: StepPlan, last_tokens: Tensor | None = None) -> LaunchedStep:
        """Build the plan's batch and execute it. `last_tokens` [S]: the input tokens, if the CPU does not have them."""
        batch = build_batch(plan, self.block_size)
        if self.speculator.reads_hidden(plan):
            all_rows = build_batch(plan, self.block_size, all_outputs=True)
            outputs, hidden = self.executor.run(ExecuteWithHidden(batch, all_rows))
            self.speculator.observe(plan, hidden)
            return LaunchedStep(plan, outputs)
        outputs = self.executor.execute(batch, last_tokens)
        if not self.looks_ahead or not can_choose_ahead(plan):
            return LaunchedStep(plan, outputs)
        contexts = [item.sequence for item in plan.scheduled]
        return LaunchedStep(plan, outputs, choose(outputs.logits, contexts, last_tokens))

    def _launch_ahead(self, step: LaunchedStep) -> LaunchedStep | None:
        if step.tokens is None or not step.all_sequences_live():
            return None
        plan = self.scheduler.plan_ahead(step.plan)
        return plan and self._launch(plan, step.tokens.clamp(0, self.vocab_size - 1))

    def _accept(self, choices: Choices) -> None:
        """Append the chosen tokens to their sequences, then pass the new text to the sinks, which may raise."""
        now, pieces = time.monotonic(), list[tuple[Sink, Piece]]()
        searches = [group for group, _ in choices.searched if not group.request.pooling]
        self.num_generated_tokens += len(choices.sampled) + len(searches)
        for group, sequence, number, token, logprobs in choices.sampled:
            if group.error:  # another sample of the group failed
                continue
            if number != sequence.sample:
                sequence = self._begin_sample(group, sequence, number)
            try:
                reason = append_token(sequence, token, logprobs)
            except BaseException as error:
                self._fail(group, error)
                continue
            group.first_token_s = group.first_token_s or now
            pieces += take_piece(group, sequence)
            if reason:
                group.completions[sequence.sample] = completion_of(sequence, reason)
                self.scheduler.finish(group, sequence)
                self.speculator.learn(sequence)
        for group, continuations in choices.searched:
            group.first_token_s = group.first_token_s or now
            for sequence in group.sequences:
                pieces += take_piece(group, sequence)
            self.scheduler.branch(group, continuations)
        for sink, piece in pieces:
            sink(*piece)

    def _begin_sample(self, group: SequenceGroup, sequence: Sequence, sample: int) -> Sequence:
        fork = self.scheduler.fork(sequence)
        fork.sample = sample
        group.sequences.append(fork)
        return fork

    def _fail(self, group: SequenceGroup, error: BaseException) -> None:
        if not belongs_to_request(error):
            raise error
        self.cancel(group)
        group.error = error

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        tokenizer, params = self.tokenizer, request.params
        if tokenizer is None:
            return None
        skip = params.skip_special_tokens

        def hidden_text(id: int) -> str:
            is_hidden = skip and params.stop and tokenizer.token_bytes(id) is None
            return tokenizer.decode([id], skip_special_tokens=False) if is_hidden else ""

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip)

        return Detokenizer(decode, request.prompt_token_ids, params.stop, params.include_stop, hidden_text)

    def num_at_once(self, num_tokens: int) -> int:
        """Return how many prompts of `num_tokens` tokens `hidden_states` takes in one step."""
        blocks = self.scheduler.block_manager
        by_memory = blocks.num_free_blocks // blocks.num_blocks_for(num_tokens)
        return min(by_memory, self.config.max_batched_tokens // num_tokens)

    @torch.inference_mode()
    def hidden_states(self, prompts: list[list[int]], num_outputs: list[int]) -> Tensor:
        """Compute hidden states [R, E] of the last `num_outputs` tokens of each prompt, in a separate step.

        The prompts' keys and values are read from the cache, as for requests. Takes at most `num_at_once` prompts.
        """
        blocks = self.scheduler.block_manager
        tables = [blocks.allocate(blocks.num_blocks_for(len(prompt))) for prompt in prompts]
        try:
            features = [self.executor.prompt_features(prompt) for prompt in prompts]
            batch = prompt_batch(prompts, num_outputs, tables, features, self.block_size)
            return self.executor.run(Hidden(batch))
        finally:
            for table in tables:
                blocks.free(table)

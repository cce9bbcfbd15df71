"""The step: plan, build the batch, execute, sample, commit."""

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from pipelines.engine.batch import build_batch, prompt_batch
from pipelines.engine.choices import Choices, choose_tokens
from pipelines.engine.executor import Executor
from pipelines.engine.faults import belongs_to_request
from pipelines.engine.lookahead import LaunchedStep, can_choose_ahead
from pipelines.engine.operations import CopyBlocks, Execute, ExecuteWithHidden, Hidden
from pipelines.engine.request import Sequence, SequenceGroup, Sink
from pipelines.engine.sampler import choose
from pipelines.engine.scheduler import Scheduler, StepPlan
from pipelines.engine.speculation import Speculator
from pipelines.engine.steps import StepOutputs
from pipelines.engine.stopping import Piece, append_token, completion_of, take_piece
from pipelines.engine.top_p_window import verify

# A microbatch spreads the token budget of its prompts over this number of steps. The other pipeline stages wait in the
# first and in the last of these steps.
MICROBATCH_STEPS = 4


class StepLoop:
    """Computes the scheduler's groups step by step. `Engine` adds the requests."""

    def __init__(self, scheduler: Scheduler, block_size: int, vocab_size: int, looks_ahead: bool) -> None:
        """The caller calls `use` before the first step."""
        self.scheduler = scheduler
        self.block_size, self.vocab_size = block_size, vocab_size
        self.looks_ahead = looks_ahead
        """Whether a step is launched before the previous step's tokens are known, if its plan allows it."""
        self.speculator = Speculator(scheduler)
        self._launched: LaunchedStep | None = None  # the next step, launched before the CPU has its input tokens
        # Steps in flight. No group is in two of them.
        self._microbatches: deque[tuple[StepPlan, Callable[[], StepOutputs]]] = deque()
        self.num_generated_tokens = 0  # by all requests so far
        self.num_computed_tokens = 0  # without drafts

    def use(self, executor: Executor) -> None:
        """Compute the next steps with this executor. The outputs of steps in flight are dropped."""
        launched = [] if self._launched is None or self._launched.is_confirmed else [self._launched.plan]
        self.scheduler.recompute([*launched, *(plan for plan, _ in self._microbatches)])
        self.executor = executor
        self._launched = None
        self._microbatches.clear()

    @property
    def is_next_computed(self) -> bool:
        """Whether the next step's outputs are already computed, because an earlier step's drafts were accepted."""
        return self._launched is not None and self._launched.is_confirmed

    def cancel(self, group: SequenceGroup) -> None:
        """End a running or waiting group."""
        self.scheduler.cancel(group)

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
        is_computed_again = step.is_confirmed and self.scheduler.state_manager.num_slots > 0
        if not is_computed_again:
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
            share = self.scheduler.max_batched_tokens // (num_microbatches * MICROBATCH_STEPS)
            max_tokens = share if max_tokens is None else min(max_tokens, share)
        while len(microbatches) < num_microbatches:
            plan = self.scheduler.plan(max_tokens, [plan for plan, _ in microbatches], num_microbatches)
            if plan.copies or plan.window_copies:
                executor.run(CopyBlocks(plan.copies, plan.window_copies))
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

    def num_at_once(self, num_tokens: int) -> int:
        """Return how many prompts of `num_tokens` tokens `hidden_states` takes in one step."""
        blocks, windows = self.scheduler.block_manager, self.scheduler.window_blocks
        num_free = min(blocks.num_free_blocks, windows.num_free_blocks if windows.num_blocks else blocks.num_blocks)
        return min(num_free // blocks.num_blocks_for(num_tokens), self.scheduler.max_batched_tokens // num_tokens)

    @torch.inference_mode()
    def hidden_states(self, prompts: list[list[int]], num_outputs: list[int]) -> Tensor:
        """Compute hidden states [R, E] of the last `num_outputs` tokens of each prompt, in a separate step.

        The prompts' keys and values are read from the cache, as for requests. Takes at most `num_at_once` prompts.
        """
        blocks, windows = self.scheduler.block_manager, self.scheduler.window_blocks
        tables = [blocks.allocate(blocks.num_blocks_for(len(prompt))) for prompt in prompts]
        window_tables = [windows.allocate(len(table)) for table in tables if windows.num_blocks]
        try:
            features = [self.executor.prompt_features(prompt) for prompt in prompts]
            is_recurrent = self.scheduler.state_manager.num_slots > 0
            batch = prompt_batch(prompts, num_outputs, tables, features, self.block_size, is_recurrent, window_tables)
            return self.executor.run(Hidden(batch))
        finally:
            for table in tables:
                blocks.free(table)
            for table in window_tables:
                windows.free(table)

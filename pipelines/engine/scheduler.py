"""Continuous batching: which requests run in the next step, and with how many tokens.

Requests are served in the order in which they arrive, background requests last. Long prompts are computed in chunks.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Set
from typing import NamedTuple

from models.capabilities import ModelCapabilities
from pipelines.engine.adapter_slots import AdapterId, AdapterSlots
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.prefix_cache import PrefixCache
from pipelines.engine.request import Continuation, Sequence, SequenceGroup
from pipelines.engine.state_manager import StateManager, StateSlots
from pipelines.engine.window_blocks import WindowBlocks


class Scheduled(NamedTuple):
    group: SequenceGroup
    sequence: Sequence
    start: int
    """Position of the first new token. Earlier tokens are in the cache when the step runs."""
    num_new_tokens: int
    num_outputs: int
    """The last `num_outputs` of the new tokens are output rows."""
    drafts: tuple[int, ...] = ()
    """Draft tokens that follow the new tokens. The step also computes them, and each is an output row."""
    state_slots: StateSlots | None = None
    """None: the model has no recurrent layer, or the token is an accepted draft of an earlier step."""


class StepPlan(NamedTuple):
    scheduled: list[Scheduled]
    ready: list[SequenceGroup]
    """The groups whose tokens are all computed after this step. Only these groups get new tokens."""
    copies: list[tuple[int, int]]
    """Pairs of source and target blocks to copy before the step (copy-on-write of shared blocks)."""
    window_copies: list[tuple[int, int]]
    """The same for layers with blocks of their own."""


class Scheduler:
    """Plans steps for at most `max_num_requests` requests.

    Every generating sequence gets one token per step. Prompts share the remaining token budget evenly, so that a long
    prompt does not stall other sequences. A request is admitted when the pool can hold all its current tokens. If it
    grows and no block is free, the last admitted request releases its blocks and is computed again later (preemption by
    recomputation).
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_requests: int,
        max_batched_tokens: int,
        capabilities: ModelCapabilities,
        adapters: AdapterSlots | None = None,
        state_manager: StateManager | None = None,
        turn_end_ids: Set[int] = frozenset(),
        window_blocks: WindowBlocks | None = None,
    ) -> None:
        """`max_batched_tokens`: token budget of a step, unless the caller passes a smaller one.

        `capabilities`: the model's. `adapters`: the slots for requests with an adapter. `state_manager`: the slots for
        recurrent states, unless no layer is recurrent. `turn_end_ids`: the tokens that end a turn of a conversation.
        `window_blocks`: of the layers with windows, unless all layers have the same blocks.
        """
        self._adapters = adapters
        self.block_manager = block_manager
        self.state_manager = state_manager or StateManager(0)
        self.window_blocks = window_blocks or WindowBlocks(0, block_manager.block_size, 1, 0)
        self.prefix_cache = PrefixCache(block_manager, self.state_manager, self.window_blocks, turn_end_ids)
        self.max_num_requests = max_num_requests
        self.max_batched_tokens = max_batched_tokens
        self._needs_whole_prompt = capabilities.needs_whole_prompt
        """Whether a request is admitted only to a step that has room for all its tokens."""
        self._long_rope_threshold = capabilities.long_rope_threshold
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []  # in the order of admission
        self._reserved: list[Sequence] = []  # sequences with extra blocks for drafts

    def add(self, group: SequenceGroup) -> None:
        """Queue a group. Background groups wait behind all other groups."""
        assert group.request.params.num_sequences <= self.max_batched_tokens  # so that each gets a token per step
        group.queued_s = time.monotonic()
        self.waiting.append(group)
        if not group.request.is_background:
            self.waiting = deque(sorted(self.waiting, key=lambda group: group.request.is_background))

    @property
    def adapters_in_use(self) -> set[AdapterId | None]:
        return {group.request.adapter for group in (*self.running, *self.waiting)}

    def plan(
        self, max_tokens: int | None = None, in_flight: Iterable[StepPlan] = (), num_microbatches: int = 1
    ) -> StepPlan:
        """Plan a step of at most `max_tokens` tokens, or of `max_batched_tokens` if this is less.

        The step exceeds `max_tokens` if more sequences run than `max_tokens`, or if prompts cannot be split. `in_flight`:
        plans of unfinished steps, whose groups are not considered. The step takes at most 1/num_microbatches of the
        running groups (rounded up), possibly none.

        The plan preempts groups if the running groups need more blocks than are free. Otherwise it admits waiting groups.
        """
        busy = {item.group for plan in in_flight for item in plan.scheduled}
        idle = [group for group in self.running if group not in busy]
        copies: list[tuple[int, int]] = []
        # 1. Blocks: free unused draft blocks, allocate for the running groups, then admit waiting groups.
        while self._reserved:
            self._free_surplus_blocks(self._reserved.pop())
        for group in idle:
            self._recompute_past_threshold(group)
        if self._allocate_or_preempt(idle, bool(busy), copies):
            while self.waiting and self._fits_limits(self.waiting[0]) and self._admit(self.waiting[0], copies):
                self.running.append(self.waiting.popleft())
                idle.append(self.running[-1])
        # 2. Tokens: share the token budget between the sequences of this microbatch.
        groups = idle[: -(-len(self.running) // num_microbatches)]  # 1/num_microbatches of the running groups
        sequences = [sequence for group in groups for sequence in group.sequences]
        num_new_tokens = self._share_budget(sequences, max_tokens)
        # 3. Outputs: a group is ready if the step computes the last token of each of its sequences.
        ready = []
        for group in groups:
            if all(num_new_tokens[sequence] == sequence.num_uncomputed_tokens for sequence in group.sequences):
                ready.append(group)
                continue
            # Keep the last tokens for a later step, because the outputs of all sequences are needed together.
            for sequence in group.sequences:
                num_new_tokens[sequence] = min(num_new_tokens[sequence], sequence.num_uncomputed_tokens - 1)
        scheduled, window_copies = list[Scheduled](), list[tuple[int, int]]()
        for group in groups:
            for sequence in group.sequences:
                if count := num_new_tokens[sequence]:
                    window_copies += self.window_blocks.extend(sequence, sequence.num_computed_tokens + count)
                    scheduled.append(self._schedule(group, sequence, count))
        return StepPlan(scheduled, ready, copies, window_copies)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan` before the new tokens of `plan` are known. Each sequence gets one more token.

        Returns None if the next step could need a different plan: a request waits, ends or must be computed again, or
        there are too few free blocks.
        """
        sequences = [item.sequence for item in plan.scheduled]
        missing = {s: self._num_missing_blocks(s, 1) for s in sequences}
        if (
            self.waiting
            or any(self._is_past_threshold(len(s.token_ids) + 1) and not s.is_past_threshold for s in sequences)
            or any(s.num_output_tokens + 1 >= s.params.max_new_tokens for s in sequences)
            or sum(missing.values()) > self.block_manager.num_free_blocks
            or any(self.prefix_cache.saves_state(i.sequence, i.start + i.num_new_tokens) for i in plan.scheduled)
        ):
            return None
        for sequence, num_blocks in missing.items():
            sequence.block_table += self.block_manager.allocate(num_blocks)
            self.window_blocks.extend(sequence, len(sequence.token_ids) + 1)
        return StepPlan([_next_token(item) for item in plan.scheduled], plan.ready, [], [])

    def reserve(self, plan: StepPlan, max_draft_counts: list[int], max_tokens: int | None = None) -> list[int]:
        """Reserve blocks for up to `max_draft_counts[i]` draft tokens of each scheduled sequence; return the counts granted.

        Drafts use only empty blocks and the token budget that `plan` leaves. They preempt no sequence and evict no cached
        block. The next call of `plan` frees the blocks that were not used. Drafts do not cross the model's
        `long_rope_threshold`.
        """
        blocks, budget = self.block_manager, self._budget(max_tokens, len(plan.scheduled))
        budget -= sum(item.num_new_tokens for item in plan.scheduled)
        granted = []
        for item, max_drafts in zip(plan.scheduled, max_draft_counts, strict=True):
            sequence, num_tokens = item.sequence, len(item.sequence.token_ids)
            max_drafts = min(max_drafts, budget, sequence.params.max_new_tokens - sequence.num_output_tokens - 1)
            num_slots = (len(sequence.block_table) + blocks.num_empty_blocks) * blocks.block_size
            max_drafts = min(max_drafts, num_slots - sequence.prefix.num_tokens - num_tokens)
            if self._long_rope_threshold is not None and not sequence.is_past_threshold:
                max_drafts = min(max_drafts, self._long_rope_threshold - num_tokens)
            max_drafts = max(0, max_drafts)
            if (missing := self._num_missing_blocks(sequence, max_drafts)) > 0:
                sequence.block_table += blocks.allocate(missing)
                self._reserved.append(sequence)
            self.window_blocks.extend(sequence, num_tokens + max_drafts)
            budget -= max_drafts
            granted.append(max_drafts)
        return granted

    def commit(self, plan: StepPlan) -> None:
        """Record that the plan's tokens, without drafts, are in the cache.

        Blocks that became full enter the prefix cache. Skips sequences that have ended or failed since the plan was
        made; their blocks are already released. Skips accepted drafts of a model with recurrent layers: the state does
        not include them, so they are computed again together with the next token.
        """
        for item in plan.scheduled:
            sequence = item.sequence
            is_left_out = self.state_manager.num_slots > 0 and item.state_slots is None
            if sequence not in item.group.sequences or is_left_out:
                continue
            sequence.num_computed_tokens += item.num_new_tokens
            self.state_manager.keep_last(sequence.state_slots)
            self.prefix_cache.remember(sequence, item.num_new_tokens)
            self.window_blocks.slide(sequence)
            if sequence.first_output_position is not None:
                is_complete = not sequence.num_uncomputed_tokens
                sequence.first_output_position = None if is_complete else sequence.num_computed_tokens

    def recompute(self, plans: Iterable[StepPlan]) -> None:
        """Preempt the groups of computed steps whose outputs are dropped, if the model has recurrent layers.

        Their states contain tokens that the next step would compute once more. Keys and values are only written again.
        """
        if self.state_manager.num_slots:
            dropped = {item.group for plan in plans for item in plan.scheduled}
            for group in [group for group in reversed(self.running) if group in dropped]:
                self._preempt(group)

    def branch(self, group: SequenceGroup, continuations: list[Continuation]) -> None:
        """Replace the group's sequences by these continuations.

        A sequence with several continuations is forked; a sequence without continuations ends.
        """
        sequences, continued = [], set()
        for continuation in continuations:
            sequence = continuation.parent
            if sequence in continued:
                sequence = self.fork(sequence)
            else:
                continued.add(sequence)
            sequences.append(sequence)
        for sequence, continuation in zip(sequences, continuations, strict=True):
            sequence.token_ids.append(continuation.token_id)
        for sequence in list(group.sequences):
            if sequence not in continued:
                self.finish(group, sequence)
        group.sequences = sequences

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy that shares the sequence's blocks (copy-on-write) and its state slot."""
        self.block_manager.share(sequence.block_table)
        self.window_blocks.share(sequence)
        self.state_manager.share(sequence.state_slots)
        return sequence.fork()

    def finish(self, group: SequenceGroup, sequence: Sequence) -> None:
        """End a sequence; the last sequence also ends the group."""
        group.sequences.remove(sequence)
        self._release(sequence)
        if not group.sequences:
            self._stop(group)
            group.finished_s = time.monotonic()

    def cancel(self, group: SequenceGroup) -> None:
        if group in self.running:
            self._stop(group)
            for sequence in group.sequences:
                self._release(sequence)
        else:
            self.waiting.remove(group)
        group.sequences = []
        group.finished_s = time.monotonic()

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block and state slot is free, or has as many owners as it counts."""
        sequences = [sequence for group in [*self.running, *self.waiting] for sequence in group.sequences]
        self.block_manager.check_integrity(sequence.block_table for sequence in sequences)
        self.window_blocks.check_integrity(sequences)
        self.state_manager.check_integrity(sequence.state_slots for sequence in sequences)

    def _schedule(self, group: SequenceGroup, sequence: Sequence, num_new_tokens: int) -> Scheduled:
        start, num_outputs = sequence.num_computed_tokens, _num_outputs(sequence, num_new_tokens)
        slots = self.state_manager.take(sequence.state_slots, is_started=start > 0)
        return Scheduled(group, sequence, start, num_new_tokens, num_outputs, state_slots=slots)

    def _share_budget(self, sequences: list[Sequence], max_tokens: int | None) -> dict[Sequence, int]:
        """Return the new tokens of each sequence: all that it needs, or an even share of the remaining budget."""
        budget = self._budget(max_tokens, len(sequences))
        num_new_tokens = {sequence: _num_wanted_tokens(sequence) for sequence in sequences}
        if sum(num_new_tokens.values()) <= budget:
            return num_new_tokens
        for i, sequence in enumerate(sorted(sequences, key=num_new_tokens.__getitem__)):
            num_new_tokens[sequence] = min(num_new_tokens[sequence], budget // (len(sequences) - i))
            budget -= num_new_tokens[sequence]
        return num_new_tokens

    def _budget(self, max_tokens: int | None, num_sequences: int) -> int:
        if max_tokens is None or self._needs_whole_prompt:
            return self.max_batched_tokens
        return min(self.max_batched_tokens, max(max_tokens, num_sequences))

    def _fits_limits(self, group: SequenceGroup) -> bool:
        """Whether a further request may run, and the token budget, the windows' blocks and the state slots suffice."""
        groups = [*self.running, group]
        num_sequences = sum(g.request.params.num_sequences for g in groups)
        most = self.window_blocks.max_sequences
        if most is not None and num_sequences > most:
            return False
        num_tokens = sum(g.request.params.num_sequences for g in groups)
        if self._needs_whole_prompt:
            num_tokens = sum(max(g.request.params.num_sequences, g.sequences[0].num_uncomputed_tokens) for g in groups)
        num_slots = self.state_manager.num_unpinned_slots
        if self.state_manager.num_slots and num_slots < sum(
            StateManager.num_needed(g.request.params.num_sequences) for g in groups
        ):
            return False
        return len(self.running) < self.max_num_requests and num_tokens <= self.max_batched_tokens

    def _allocate_or_preempt(
        self, idle: list[SequenceGroup], steps_in_flight: bool, copies: list[tuple[int, int]]
    ) -> bool:
        """Allocate blocks for the tokens of every idle sequence. Returns False if there were too few free blocks.

        In this case the last groups are removed from `idle` and preempted. With steps in flight, the group that lacks
        blocks is removed but not preempted, because the end of a step can free blocks. `copies` receives the shared
        blocks that the step writes, with their copies.
        """
        enough = True
        for group in list(idle):
            while group in idle and self._num_missing_in_group(group) > self.block_manager.num_free_blocks:
                last, enough = idle.pop(), False
                if last is not group or not steps_in_flight:
                    self._preempt(last)
            if group in idle:
                for sequence in group.sequences:
                    self._allocate(sequence, copies)
        return enough

    def _recompute_past_threshold(self, group: SequenceGroup) -> None:
        """Release the sequences of a group that has just crossed `long_rope_threshold`: all their tokens are recomputed.

        The sequences of a group have equal lengths.
        """
        first = group.sequences[0]
        if first.is_past_threshold or not self._is_past_threshold(len(first.token_ids)):
            return
        for sequence in group.sequences:
            self._release(sequence)
            self._update_past_threshold(sequence)
        if group.search:
            group.search.recompute(group)

    def _update_past_threshold(self, sequence: Sequence) -> None:
        """Update `is_past_threshold` of a sequence without computed tokens."""
        is_past_threshold = self._is_past_threshold(len(sequence.token_ids))
        if is_past_threshold != sequence.is_past_threshold:
            sequence.block_hashes.clear()
        sequence.is_past_threshold = is_past_threshold

    def _is_past_threshold(self, num_tokens: int) -> bool:
        return self._long_rope_threshold is not None and num_tokens > self._long_rope_threshold

    def _admit(self, group: SequenceGroup, copies: list[tuple[int, int]]) -> bool:
        """Take cached blocks for the group's one sequence, allocate the rest, and fill blocks from the tiers.

        Returns False if the pool cannot hold the sequence, or if the group's adapter gets no slot.
        """
        sequence = group.sequences[0]
        self._update_past_threshold(sequence)
        self.prefix_cache.take(sequence)
        if self._num_missing_in_group(group) > self.block_manager.num_free_blocks or not self._take_adapter(group):
            self._release(sequence)
            return False
        self.state_manager.count_hits(sequence.state_slots)
        num_copies = len(copies)
        self._allocate(sequence, copies)
        if self.prefix_cache.load(sequence):
            del copies[num_copies:]  # of a soft prefix's last block: the first loaded block has its tokens
        if group.num_cached_tokens is None:  # the first admission: after a preemption the group finds its own blocks
            group.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        self._stop(group)
        for sequence in group.sequences:
            self._release(sequence)
        group.num_preemptions += 1
        group.restart()
        self.waiting.appendleft(group)

    def _take_adapter(self, group: SequenceGroup) -> bool:
        adapter = group.request.adapter
        if adapter is None:
            return True
        assert self._adapters is not None
        slot = self._adapters.acquire(adapter)
        group.adapter_slot = -1 if slot is None else slot
        return slot is not None

    def _stop(self, group: SequenceGroup) -> None:
        self.running.remove(group)
        if group.request.adapter is not None and self._adapters is not None:
            self._adapters.release(group.request.adapter)
            group.adapter_slot = -1

    def _num_missing_in_group(self, group: SequenceGroup) -> int:
        missing = sum(map(self._num_missing_blocks, group.sequences))
        if len(group.sequences) == 1 and not group.request.prefix.blocks:
            return missing
        written = Counter(block for s in group.sequences if (block := self._written_block(s)) is not None)
        # The last owner of a block writes into it without a copy. A prefix is an owner that never writes.
        return missing + sum(n - (self.block_manager.num_owners(block) == n) for block, n in written.items())

    def _num_missing_blocks(self, sequence: Sequence, num_more_tokens: int = 0) -> int:
        """Return how many blocks the sequence lacks for its tokens plus `num_more_tokens`; negative: surplus."""
        num_tokens = sequence.prefix.num_tokens + len(sequence.token_ids) + num_more_tokens
        return self.block_manager.num_blocks_for(num_tokens) - len(sequence.block_table)

    def _free_surplus_blocks(self, sequence: Sequence) -> None:
        if (surplus := -self._num_missing_blocks(sequence)) > 0:
            self.block_manager.free(sequence.block_table[-surplus:])
            del sequence.block_table[-surplus:]
        self.window_blocks.trim(sequence)

    def _written_block(self, sequence: Sequence) -> int | None:
        """Return the partly filled block that the next token goes to, if any.

        Only such a block can be both shared and written.
        """
        num_cached_tokens = sequence.prefix.num_tokens + sequence.num_computed_tokens
        index, offset = divmod(num_cached_tokens, self.block_manager.block_size)
        return sequence.block_table[index] if offset else None

    def _allocate(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        blocks = self.block_manager
        shared = self._written_block(sequence)
        if shared is not None and blocks.num_owners(shared) > 1:
            (copy,) = blocks.allocate(1)
            blocks.free([shared])
            sequence.block_table[sequence.block_table.index(shared)] = copy
            copies.append((shared, copy))
        if missing := self._num_missing_blocks(sequence):
            sequence.block_table += blocks.allocate(missing)

    def _release(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence.block_table)
        self.window_blocks.release(sequence)
        self.state_manager.free(sequence.state_slots)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.drafting = None


def _next_token(item: Scheduled) -> Scheduled:
    """Return the item of the step after this one, which has one more token."""
    slots = item.state_slots and item.state_slots._replace(read=item.state_slots.write)
    return item._replace(start=item.start + item.num_new_tokens, num_new_tokens=1, state_slots=slots)


def _num_wanted_tokens(sequence: Sequence) -> int:
    """Return the number of tokens up to the next snapshot in the prompt, or of all that are not computed."""
    ends = [end for end in sequence.snapshots.ends if end > sequence.num_computed_tokens]
    return min([*ends, len(sequence.token_ids)]) - sequence.num_computed_tokens


def _num_outputs(sequence: Sequence, num_new_tokens: int) -> int:
    after = sequence.num_computed_tokens + num_new_tokens
    first = len(sequence.token_ids) - 1 if sequence.first_output_position is None else sequence.first_output_position
    return max(0, after - max(first, sequence.num_computed_tokens))

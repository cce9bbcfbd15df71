"""A scheduler without a model: requests, and steps that check every block that they use."""

from typing import Any

from conf.decoding import DecodeConfig
from models.capabilities import ModelCapabilities
from pipelines.engine.block_manager import BlockManager
from pipelines.engine.engine_config import EngineConfig
from pipelines.engine.request import (
    NO_PREFIX,
    Completion,
    ContextLimit,
    Continuation,
    FinishReason,
    PlacedPrefix,
    Request,
    Sequence,
    SequenceGroup,
)
from pipelines.engine.request_factory import RequestFactory, resolve_sampling_params
from pipelines.engine.scheduler import Scheduled, Scheduler, StepPlan
from pipelines.engine.state_manager import StateManager

TURN_END = 3


class FakeBeams:
    """A search whose beams are a function of the tokens so far: the first parent continues twice, the last one ends."""

    def observe(self, hidden: Any) -> None: ...

    def recompute(self, group: SequenceGroup) -> None: ...

    def restart(self, group: SequenceGroup) -> Sequence:
        return group.origin.fork()

    def advance(self, group: SequenceGroup, logits: Any) -> list[Continuation]:
        params, sequences = group.request.params, group.sequences
        if sequences[0].num_output_tokens + 1 == params.max_new_tokens:
            tokens = [*sequences[0].output_token_ids, next_token(sequences[0].token_ids)]
            group.completions[0] = Completion(tokens, None, FinishReason.length, None)
            return []
        parents = [sequences[0], *sequences][: params.num_beams]
        return [Continuation(parent, next_token(parent.token_ids) + i) for i, parent in enumerate(parents)]


def next_token(token_ids: list[int]) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 997


def sequence(
    id: int,
    prompt: list[int] | int,
    max_new_tokens: int = 5,
    prefix_cache: bool = True,
    placed: PlacedPrefix = NO_PREFIX,
    is_background: bool = False,
    **decode: Any,
) -> SequenceGroup:
    tokens = [id * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    config = DecodeConfig(max_new_tokens=max_new_tokens, prefix_cache=prefix_cache, **decode).resolved({})
    params = resolve_sampling_params(config, len(tokens), ContextLimit(10**6, "limit"), frozenset())
    request = Request(id, tokens, params, prefix=placed, is_background=is_background)
    search = FakeBeams() if params.num_beams > 1 else None
    return SequenceGroup(request, Sequence.begin(request), search)


def scheduler_of(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_requests: int = 4,
    budget: int = 64,
    states: StateManager | None = None,
    **capabilities: Any,
) -> Scheduler:
    blocks = BlockManager(num_blocks, block_size)
    settings = max_num_requests, budget, ModelCapabilities(**capabilities), None, states
    return Scheduler(blocks, *settings, turn_end_ids={TURN_END})


def factory_of(vocab_size: int = 96, num_tokens: int = 4096) -> RequestFactory:
    """Return the factory of an engine whose context, cache and steps have at least `num_tokens` tokens."""
    config = EngineConfig(ContextLimit(num_tokens, "max_position_embeddings"), frozenset(), {}, 1, num_tokens)
    return RequestFactory(None, vocab_size, ModelCapabilities(), config, num_blocks=num_tokens, block_size=16)


States = dict[int, tuple[int, ...]]
"""The tokens that the state in each slot was computed from."""

Keys = dict[tuple[int, int], tuple[object, ...]]
"""For each slot of each block, the input that its key was computed from: the prefix, and the tokens up to the slot's
own."""


def step(
    scheduler: Scheduler,
    sides: dict[int, bool] | None = None,
    max_tokens: int | None = None,
    keys: Keys | None = None,
    num_drafts: int = 0,
    num_right: int = 0,
    states: States | None = None,
) -> dict[int, int]:
    """Plan and commit a step with a fake model whose next token is a function of the tokens so far.

    Returns the tokens that each request computed. `sides`: for each block, whether its keys are for texts beyond the
    long RoPE threshold; kept from step to step, as `keys` and `states` are. Sequences request `num_drafts` drafts, of which the
    first `num_right` are right.
    """
    plan = scheduler.plan(max_tokens)
    scheduler.check_integrity()
    check_writable(scheduler)
    result: dict[int, int] = {}
    for item in plan.scheduled:
        assert not scheduler._needs_whole_prompt or item.num_new_tokens == item.sequence.num_uncomputed_tokens
        result[item.group.request.id] = result.get(item.group.request.id, 0) + item.num_new_tokens
    plan = with_drafts(scheduler, plan, max_tokens, num_drafts, num_right)
    if sides is not None:
        check_sides(scheduler, plan, sides)
    if keys is not None:
        check_keys(scheduler, plan, keys)
    if states is not None:
        check_states(plan, states)
    while plan.scheduled:  # again for accepted drafts, which need no computation
        scheduler.commit(plan)
        for group in plan.ready:
            advance(scheduler, group, [item.sequence for item in plan.scheduled])
        plan = confirmed(plan)
    scheduler.check_integrity()
    return result


def advance(scheduler: Scheduler, group: SequenceGroup, computed: list[Sequence]) -> None:
    if group.search:
        return scheduler.branch(group, group.search.advance(group, None))
    sequences = [s for s in group.sequences if s in computed]
    if group.num_output_tokens == 0:
        for i in range(1, group.request.params.n):
            fork = scheduler.fork(group.sequences[0])
            fork.sample = i
            group.sequences.append(fork)
            sequences.append(fork)
    for s in sequences:
        s.token_ids.append(next_token(s.token_ids) + s.sample)
        if s.num_output_tokens == s.request.params.max_new_tokens:
            group.completions[s.sample] = Completion(s.output_token_ids, None, FinishReason.length, None)
            scheduler.finish(group, s)
    return None


def with_drafts(
    scheduler: Scheduler, plan: StepPlan, max_tokens: int | None, num_drafts: int, num_right: int
) -> StepPlan:
    """Return the plan with drafts. Drafts evict no cached block and fit the remaining token budget."""
    blocks = scheduler.block_manager
    wanted = [
        num_drafts * (i.group in plan.ready and not i.group.search and i.sequence.num_output_tokens > 0)
        for i in plan.scheduled
    ]
    num_cached = len(blocks._cached)
    reserved = scheduler.reserve(plan, wanted, max_tokens)
    scheduler.check_integrity()
    assert len(blocks._cached) == num_cached
    num_tokens = sum(item.num_new_tokens for item in plan.scheduled)
    assert not any(reserved) or num_tokens + sum(reserved) <= scheduler._budget(max_tokens, len(plan.scheduled))
    scheduled = []
    for item, count, most in zip(plan.scheduled, reserved, wanted, strict=True):
        assert count <= most
        tokens = list(item.sequence.token_ids)
        for place in range(count):
            tokens.append(next_token(tokens) + item.sequence.sample if place < num_right else -1)
        scheduled.append(item._replace(drafts=tuple(tokens[len(tokens) - count :])))
    return plan._replace(scheduled=scheduled)


def confirmed(plan: StepPlan) -> StepPlan:
    """Return the next plan, without computing, for sequences whose first draft was accepted."""
    scheduled = [
        Scheduled(i.group, i.sequence, i.start + i.num_new_tokens, 1, 1, i.drafts[1:])
        for i in plan.scheduled
        if i.drafts and i.sequence in i.group.sequences and i.sequence.token_ids[-1] == i.drafts[0]
    ]
    return StepPlan(scheduled, list(dict.fromkeys(item.group for item in scheduled)), [], [])


def check_keys(scheduler: Scheduler, plan: StepPlan, keys: Keys) -> None:
    """Check that every key that a sequence reads was computed from its own prefix and tokens, by any sequence."""
    size = scheduler.block_manager.block_size
    for source, target in plan.copies:
        keys |= {(target, place): keys[source, place] for place in range(size) if (source, place) in keys}
    for item in plan.scheduled:
        sequence, first = item.sequence, item.sequence.prefix.num_tokens
        token_ids = [*sequence.token_ids[: item.start + item.num_new_tokens], *item.drafts]
        for i in range(len(token_ids)):
            block, place = divmod(first + i, size)
            key = (sequence.prefix.digest, *token_ids[: i + 1])
            if i < item.start:
                assert keys[sequence.block_table[block], place] == key
            keys[sequence.block_table[block], place] = key


def check_states(plan: StepPlan, states: States) -> None:
    """Check that every state that a sequence reads is of its own tokens, and that the step writes no slot twice and none
    that another sequence reads."""
    slots = [(item, item.state_slots) for item in plan.scheduled if item.state_slots]
    writes = [written for _, (_, written) in slots]
    assert len(set(writes)) == len(writes)
    for item, (read, written) in slots:
        assert (read < 0) == (item.start == 0)
        assert read < 0 or states[read] == tuple(item.sequence.token_ids[: item.start])
        assert read == written or read not in writes
    for item, (_, written) in slots:
        states[written] = tuple(item.sequence.token_ids[: item.start + item.num_new_tokens])


def check_writable(scheduler: Scheduler) -> None:
    """Check that every sequence has blocks for its tokens, and is the only owner of the blocks that it is about to
    write."""
    blocks = scheduler.block_manager
    for group in scheduler.running:
        for s in group.sequences:
            first = s.prefix.num_tokens
            assert len(s.block_table) == blocks.num_blocks_for(first + len(s.token_ids))
            written = s.block_table[(first + s.num_computed_tokens) // blocks.block_size :]
            assert all(blocks.num_owners(block) == 1 for block in written)


def check_sides(scheduler: Scheduler, plan: StepPlan, sides: dict[int, bool]) -> None:
    """Check that every key that a sequence reads was computed for a text on its side of the long RoPE threshold, drafts
    included."""
    for source, target in plan.copies:
        sides[target] = sides[source]
    size = scheduler.block_manager.block_size
    for item in plan.scheduled:
        sequence, num_new_tokens = item.sequence, item.num_new_tokens
        is_past_threshold = (
            scheduler._long_rope_threshold is not None and len(sequence.token_ids) > scheduler._long_rope_threshold
        )
        assert is_past_threshold or len(sequence.token_ids) + len(item.drafts) <= (
            scheduler._long_rope_threshold or 10**9
        )
        before = sequence.num_computed_tokens
        after = before + num_new_tokens + len(item.drafts)
        assert all(sides[block] == is_past_threshold for block in sequence.block_table[: -(-before // size)])
        sides |= dict.fromkeys(sequence.block_table[before // size : -(-after // size)], is_past_threshold)

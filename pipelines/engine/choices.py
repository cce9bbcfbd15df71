"""Sample the step's tokens and collect the requested log probabilities."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from pipelines.engine.faults import belongs_to_request, not_finite
from pipelines.engine.lookahead import LaunchedStep
from pipelines.engine.request import Continuation, SamplingContext, Sequence, SequenceGroup, TokenLogprobs
from pipelines.engine.sampler import sample, token_logprobs
from pipelines.engine.scheduler import Scheduled

LOGPROB_ROWS = 256  # rows of prompt log probabilities per call, which bounds the float32 copies

Fail: TypeAlias = Callable[[SequenceGroup, BaseException], None]
"""Ends one request's group; raises the exception again if it does not belong to one request."""


class Sampled(NamedTuple):
    """The next token of a sequence, or the first token of a sample that will be forked from the sequence."""

    group: SequenceGroup
    sequence: Sequence
    sample: int
    token: int | None
    """None if all tokens were banned."""
    logprobs: list[TokenLogprobs]


class Choices(NamedTuple):
    """The tokens and the search continuations that a step chose."""

    sampled: list[Sampled]
    searched: list[tuple[SequenceGroup, list[Continuation]]]


def choose_tokens(step: LaunchedStep, fail: Fail) -> Choices:
    """Choose the next tokens of a step. If a row or its sampling fails, only its group ends."""
    finite, tokens = step.wait()
    rows = _observe(step, finite, fail)
    if step.tokens is not None:
        pairs = zip(step.plan.scheduled, tokens, strict=True)
        return Choices([Sampled(i.group, i.sequence, 0, token, []) for i, token in pairs if i.sequence in rows], [])
    ready, logits = [group for group in step.plan.ready if group.sequences and not group.error], step.outputs.logits
    sampled = _sample([group for group in ready if not group.search], rows, logits, step.fixed_tokens, fail)
    searched = []
    for group in ready:
        if group.search:
            try:
                group_logits = logits[[rows[sequence] for sequence in group.sequences]]
                searched.append((group, group.search.advance(group, group_logits)))
            except BaseException as error:
                fail(group, error)
    return Choices(sampled, searched)


def _observe(step: LaunchedStep, finite: list[bool], fail: Fail) -> dict[Sequence, int]:
    """Collect prompt log probabilities and hidden states. Returns the row of each live sequence's last token."""
    rows, all_finite = {}, all(finite)
    for item, begin in zip(step.plan.scheduled, step.first_rows, strict=True):
        group, end = item.group, begin + item.num_outputs
        if item.sequence not in group.sequences:
            continue
        try:
            if not all_finite and not all(finite[begin:end]):
                raise not_finite()
            if group.search:
                group.search.observe(step.outputs.hidden[begin:end])
            if group.request.params.prompt_logprobs is not None:
                add_prompt_logprobs(item, step.outputs.logits[begin:end])
        except BaseException as error:
            fail(group, error)
            continue
        rows[item.sequence] = end - 1
    return rows


def _sample(
    groups: list[SequenceGroup],
    rows: dict[Sequence, int],
    logits: Tensor,
    fixed_tokens: dict[tuple[Sequence, int], int | None],
    fail: Fail,
) -> list[Sampled]:
    if not groups:
        return []
    chosen = [
        (group, sequence, context) for group in groups for sequence, context in next_contexts(group) if sequence in rows
    ]
    contexts = [context for _, _, context in chosen]
    indices = [rows[sequence] for _, sequence, _ in chosen]
    chosen_logits = logits if indices == list(range(logits.shape[0])) else logits[indices]
    try:
        tokens = sample(chosen_logits, contexts)
        if fixed_tokens:
            keys = [(sequence, len(sequence.token_ids)) for _, sequence, _ in chosen]
            tokens = [fixed_tokens.get(key, token) for key, token in zip(keys, tokens, strict=True)]
        return [
            Sampled(group, sequence, context.sample, token, chosen_logprobs(chosen_logits, row, context, token))
            for row, ((group, sequence, context), token) in enumerate(zip(chosen, tokens, strict=True))
        ]
    except BaseException as error:
        if len(groups) == 1:
            fail(groups[0], error)
            return []
        if not belongs_to_request(error):
            raise
        # Sample each group alone to find the group that fails.
        return [sampled for group in groups for sampled in _sample([group], rows, logits, fixed_tokens, fail)]


def next_contexts(group: SequenceGroup) -> list[tuple[Sequence, SamplingContext]]:
    """Return the sampling contexts of the group's next tokens, each with the sequence that it continues.

    New samples come before the sequence that they fork from, so that they fork before it grows.
    """
    n = group.request.params.n
    if len(group.sequences) == n or group.num_output_tokens:
        return [(sequence, sequence) for sequence in group.sequences]
    (first,) = group.sequences
    return [*((first, first.as_sample(i)) for i in range(1, n)), (first, first)]


def chosen_logprobs(logits: Tensor, row: int, context: SamplingContext, token: int | None) -> list[TokenLogprobs]:
    """Return the log probabilities of the chosen token from a row of logits [R, V]; empty if the request wants none."""
    num_top = context.params.logprobs
    return [] if token is None or num_top is None else token_logprobs(logits[row : row + 1], [token], num_top)


def add_prompt_logprobs(item: Scheduled, logits: Tensor) -> None:
    """Append prompt log probabilities from `logits` [P, V], the outputs of the item's last P tokens."""
    request, known = item.group.request, item.group.prompt_logprobs
    first = item.start + item.num_new_tokens - len(logits)
    logits = logits[max(0, len(known) - first) :]  # skip rows that were collected before a preemption
    targets = request.prompt_token_ids[len(known) + 1 :][: len(logits)]
    for start in range(0, len(targets), LOGPROB_ROWS):
        chunk = targets[start : start + LOGPROB_ROWS]
        rows = logits[start : start + len(chunk)]
        known += token_logprobs(rows, chunk, request.params.prompt_logprobs or 0)

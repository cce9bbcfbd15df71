"""What a step chose, and what goes into the choice: the contexts of next tokens, and log probabilities."""

from typing import NamedTuple

from torch import Tensor

from pipelines.engine.request import Continuation, SamplingContext, Sequence, SequenceGroup, TokenLogprobs
from pipelines.engine.sampler import token_logprobs
from pipelines.engine.scheduler import Scheduled

LOGPROB_ROWS = 256  # rows of prompt log probabilities at a time: float32 copies of them stay small


class Sampled(NamedTuple):
    """The next token of a sequence, or the first one of a sample that begins as a fork of it."""

    group: SequenceGroup
    sequence: Sequence
    sample: int
    token: int | None
    """None where all were banned."""
    logprobs: list[TokenLogprobs]


class Choices(NamedTuple):
    """The tokens and continuations that a step chose."""

    sampled: list[Sampled]
    searched: list[tuple[SequenceGroup, list[Continuation]]]


def next_contexts(group: SequenceGroup) -> list[tuple[Sequence, SamplingContext]]:
    """Return contexts of the group's next tokens, each with the sequence that it continues.

    Samples that begin now come before the sequence that they are forked from, so that it has not grown by then.
    """
    n = group.request.params.n
    if len(group.sequences) == n or group.num_output_tokens:
        return [(sequence, sequence) for sequence in group.sequences]
    (first,) = group.sequences
    return [*((first, first.as_sample(i)) for i in range(1, n)), (first, first)]


def chosen_logprobs(logits: Tensor, row: int, context: SamplingContext, token: int | None) -> list[TokenLogprobs]:
    """Return those of the token that was chosen from a row of logits [R, V], if the request asks for them."""
    num_top = context.params.logprobs
    return [] if token is None or num_top is None else token_logprobs(logits[row : row + 1], [token], num_top)


def add_prompt_logprobs(item: Scheduled, logits: Tensor) -> None:
    """Add what logits [P, V], of the last P tokens of the item, say of the prompt's next tokens."""
    request, known = item.group.request, item.group.prompt_logprobs
    first = item.start + item.num_new_tokens - len(logits)
    logits = logits[max(0, len(known) - first) :]  # without what was known before a preemption
    targets = request.prompt_token_ids[len(known) + 1 :][: len(logits)]
    for start in range(0, len(targets), LOGPROB_ROWS):
        chunk = targets[start : start + LOGPROB_ROWS]
        rows = logits[start : start + len(chunk)]
        known += token_logprobs(rows, chunk, request.params.prompt_logprobs or 0)

"""PaddleNLP's verification of drafts (d68a385fc, `speculate_verify_and_update.cu`).

It changes tokens: likely drafts are accepted. The candidates at a position are the most likely tokens, at most
`max_candidates`, up to the token with which they reach `top_p`. If they do not reach it, there are no candidates.

A draft is accepted if it is a candidate. A draft that is the second most likely token is also accepted if
`max_candidates` is at least 2 and each of the next `verify_window` drafts is the most likely token; then these drafts
are accepted too, and no draft after them. The token after the accepted drafts is drawn from the candidates at its
position, or is the most likely token if there are none.
"""

from collections.abc import Callable

from torch import Tensor

from conf.speculation import Acceptance, Speculate
from pipelines.engine.logits import process_logits
from pipelines.engine.lookahead import LaunchedStep
from pipelines.engine.request import SamplingContext, SequenceGroup
from pipelines.engine.sampler import next_uniform
from pipelines.engine.scheduler import Scheduled


def verify(step: LaunchedStep, fail: Callable[[SequenceGroup, BaseException], None]) -> None:
    """Choose the next tokens of rows with this acceptance rule, and fix them in the step.

    `fail` ends a group that raises.
    """
    for index, (item, row) in enumerate(zip(step.plan.scheduled, step.first_rows, strict=True)):
        if item.sequence.params.speculation.acceptance is not Acceptance.exact and is_drafted_and_drawn(item):
            end = row + item.num_outputs
            try:
                step.fix_tokens(index, verified(item, step.outputs.logits[end - 1 : end + len(item.drafts)]))
            except BaseException as error:
                fail(item.group, error)


def is_drafted_and_drawn(item: Scheduled) -> bool:
    """Return whether the item's next tokens are sampled with drafts. The first output token never is."""
    params, sequence = item.sequence.params, item.sequence
    return (
        params.speculate is not Speculate.none
        and params.samples
        and sequence.num_output_tokens > 0
        and sequence.num_uncomputed_tokens == item.num_new_tokens
    )


def verified(item: Scheduled, logits: Tensor) -> list[int | None]:
    """Return the accepted drafts and the token after them; None where all tokens were banned.

    `logits` [1 + D, V]: after the sequence's last token, and after each of the D drafts.
    """
    sequence, drafts, params = item.sequence, list(item.drafts), item.sequence.params
    settings = params.speculation
    contexts, thinking = list[SamplingContext](), sequence.thinking
    for place in range(1 + len(drafts)):
        thinking = thinking.after(drafts[place - 1]) if thinking and place else thinking
        token_ids = sequence.token_ids + drafts[:place]
        contexts.append(
            SamplingContext(params, token_ids, sequence.num_prompt_tokens, sequence.sample, thinking=thinking)
        )
    scaled = process_logits(logits, contexts).double() / params.temperature
    top = scaled.softmax(-1).topk(min(settings.max_candidates, scaled.shape[-1]))
    probabilities = top.values.tolist()
    ids = [_possible(*row) for row in zip(top.indices.tolist(), probabilities, strict=True)]
    counts = [num_candidates(row, params.top_p) for row in probabilities]
    num_kept = num_accepted(drafts, ids, counts, settings.verify_window)
    last: int | None = None
    if scaled[num_kept].max() > float("-inf"):
        number = next_uniform(contexts[num_kept])
        last = drawn(ids[num_kept], probabilities[num_kept], counts[num_kept], number * params.top_p)
    return [*drafts[:num_kept], last]


def _possible(ids: list[int], probabilities: list[float]) -> list[int]:
    return [token for token, probability in zip(ids, probabilities, strict=True) if probability > 0]


def num_candidates(probabilities: list[float], top_p: float) -> int:
    """Return how many of the most likely tokens reach `top_p` together; 0 if all of them together do not reach it."""
    total = 0.0
    for count, probability in enumerate(probabilities, 1):
        total += probability
        if total >= top_p:
            return count
    return 0


def num_accepted(drafts: list[int], ids: list[list[int]], counts: list[int], window: int) -> int:
    """Return how many drafts are accepted.

    `ids[i]`: the most likely tokens at draft i, best first, of which the first `counts[i]` are candidates.
    """
    for place, draft in enumerate(drafts):
        if draft in ids[place][: counts[place]]:
            continue
        after = range(place + 1, place + 1 + window)
        if [draft] == ids[place][1:2] and after.stop <= len(drafts) and all([drafts[i]] == ids[i][:1] for i in after):
            return after.stop
        return place
    return len(drafts)


def drawn(ids: list[int], probabilities: list[float], count: int, number: float) -> int:
    """Return the first candidate whose cumulative probability reaches `number`.

    Without candidates, return the most likely token.
    """
    total = 0.0
    for token, probability in zip(ids[:count], probabilities, strict=False):
        total += probability
        if total >= number:
            return token
    return ids[0]

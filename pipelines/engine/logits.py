"""Changes logits as requests ask: biases, penalties, allowed tokens, bans, forced tokens, guides, in this order, all rows at once.

Only the tokens that something is done to are touched. On a GPU nothing waits for it, and a row's last token may be one that
only the GPU knows. R rows, V tokens in the vocabulary.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from kernels.mask_logits import mask_logits
from pipelines.engine.ngrams import NgramIndex
from pipelines.engine.request import SamplingContext
from pipelines.engine.token_counts import TokenCounts

TYPE_CODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def waits_for_tokens(context: SamplingContext) -> bool:
    """Return whether bans or biases depend on the last token, so that the CPU must know it: n-grams, longer sequences, guides."""
    p = context.params
    sequences = (*p.bad_words, *(ids for ids, _ in p.sequence_bias))
    return bool(p.no_repeat_ngram_size or context.guide) or any(len(ids) > 1 for ids in sequences)


def process_logits(logits: Tensor, contexts: Sequence[SamplingContext], last_tokens: Tensor | None = None) -> Tensor:
    """Return rows [R, V], float32, a copy; the same tensor where nobody asks for anything. A token that may not be chosen has -inf.

    `last_tokens` int64 [R], on the logits' device: the token after those that each context lists; for rows that need not wait for it.
    """
    assert last_tokens is None or not any(map(waits_for_tokens, contexts))
    vocab_size, num_unknown = logits.shape[1], int(last_tokens is not None)
    if not any(_asks_for_something(context, num_unknown) for context in contexts):
        return logits
    rows = [(row * vocab_size, context, context.params) for row, context in enumerate(contexts)]
    biases = [(start + id, bias) for start, context, _ in rows for id, bias in _biases(context) if id < vocab_size]
    restricted = [row for row, (_, _, p) in enumerate(rows) if p.allowed_token_ids]
    allowed = [start + id for start, _, p in rows for id in p.allowed_token_ids if id < vocab_size]
    banned = [start + id for start, context, _ in rows for id in _banned(context, num_unknown) if id < vocab_size]
    penalised = [row for row, context in enumerate(contexts) if _is_penalised(context)]
    forced = {row: ids for row, context in enumerate(contexts) if (ids := _forced(context, num_unknown))}
    flat, device = logits.to(torch.float32, copy=True).flatten(), logits.device
    if biases:
        places = to_device([place for place, _ in biases], torch.int64, device)
        flat.scatter_add_(0, places, to_device([bias for _, bias in biases], torch.float32, device))
    if penalised:
        _penalise(flat, vocab_size, contexts, penalised, last_tokens)
    if restricted:
        kept = to_device(allowed, torch.int64, device)
        values = flat[kept]
        flat.view_as(logits).index_fill_(0, to_device(restricted, torch.int64, device), -torch.inf)
        flat.scatter_(0, kept, values)
    if banned:
        flat.index_fill_(0, to_device(banned, torch.int64, device), -torch.inf)
    if forced:
        flat.view_as(logits).index_fill_(0, to_device(forced, torch.int64, device), -torch.inf)
        only = [row * vocab_size + id for row, ids in forced.items() for id in ids]
        flat.index_fill_(0, to_device(only, torch.int64, device), 0.0)
    result = flat.view_as(logits)
    if any(context.guide for context in contexts):
        mask_logits(result, _masks(contexts, vocab_size, device))
    return result


def _masks(contexts: Sequence[SamplingContext], vocab_size: int, device: torch.device) -> Tensor:
    """Return the bitmasks int32 [R, ceil(V / 32)] of what guides allow; other rows allow all."""
    free = bytes([255]) * (4 * -(-vocab_size // 32))
    rows = bytearray(b"".join(context.guide.mask() if context.guide else free for context in contexts))
    masks = torch.frombuffer(rows, dtype=torch.int32).view(len(contexts), -1)
    return masks.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else masks


def to_device(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a one-dimensional tensor; through pinned memory where that is a GPU, so that nothing waits for it.

    An array is read ten times faster than torch reads a list.
    """
    numbers = array(TYPE_CODES[dtype], values)
    tensor = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _asks_for_something(context: SamplingContext, num_unknown: int) -> bool:
    p = context.params
    biases = p.logit_bias or p.sequence_bias
    bans = p.allowed_token_ids or p.bad_words or p.no_repeat_ngram_size or context.guide
    return (
        bool(biases or bans or _forced(context, num_unknown))
        or _is_penalised(context)
        or _may_not_end(context, num_unknown)
    )


def _may_not_end(context: SamplingContext, num_unknown: int) -> bool:
    """Return whether the row is too short to end, though there are tokens that would end it."""
    p = context.params
    return bool(p.end_token_ids) and context.num_output_tokens + num_unknown < p.min_new_tokens


def _biases(context: SamplingContext) -> Iterable[tuple[int, float]]:
    """Yield the tokens that have a bias here."""
    p = context.params
    yield from p.logit_bias.items()
    for ids, bias in p.sequence_bias:
        if _ends_with(context.token_ids, ids[:-1]):
            yield ids[-1], bias


def _forced(context: SamplingContext, num_unknown: int) -> tuple[int, ...]:
    """Return the only tokens that may follow here, at the beginning or the end of the output; none with a guide."""
    p, place = context.params, context.num_output_tokens + num_unknown
    if context.guide is not None:
        return ()
    last = p.last_token_ids if place == p.max_new_tokens - 1 else ()
    return last or (p.first_token_ids if place == 0 else ())


def _is_penalised(context: SamplingContext) -> bool:
    p = context.params
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _penalise(
    flat: Tensor,
    vocab_size: int,
    contexts: Sequence[SamplingContext],
    penalised: list[int],
    last_tokens: Tensor | None,
) -> None:
    """Change flattened rows in place. Repetition (arXiv 1909.05858) is for all tokens of a row, presence and frequency for its output."""
    known = [_counts(contexts[row]) for row in penalised]
    listed = array("q"), array("q"), array("q")  # rows, tokens of rows, and how often each was generated
    for row, each in zip(penalised, known, strict=True):
        for numbers, more in zip(
            listed, (array("q", [row]) * len(each.counts), each.token_ids, each.counts), strict=True
        ):
            numbers += more
    rows, tokens, counts = (to_device(numbers, torch.int64, flat.device) for numbers in listed)
    if last_tokens is not None:  # one more of a token that is listed, or one that is not
        own = to_device(penalised, torch.int64, flat.device)
        again = tokens == last_tokens[rows]
        counts = counts + again
        new = torch.zeros_like(last_tokens).scatter_add_(0, rows, counts * again)[own].clamp(min=1)
        rows, tokens = torch.cat((rows, own)), torch.cat((tokens, last_tokens[own]))
        counts = torch.cat((counts, new))
    settings = [context.params for context in contexts]
    each_of_rows = chain.from_iterable(
        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in settings
    )
    repetition, presence, frequency = to_device(each_of_rows, torch.float32, flat.device).view(-1, 3)[rows].T
    places = rows * vocab_size + tokens
    values = flat.gather(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= (presence + frequency * counts) * (counts > 0)
    flat.scatter_(0, places, values)  # into a place that is there twice, the same number


def _counts(context: SamplingContext) -> TokenCounts:
    """Return the counts of the tokens that are penalised."""
    if context.counts is None:
        context.counts = TokenCounts(context.num_prompt_tokens, with_prompt=context.params.repetition_penalty != 1)
    context.counts.update(context.token_ids)
    return context.counts


def _banned(context: SamplingContext, num_unknown: int) -> set[int]:
    """Return tokens that may not follow: ends before the minimum length, repeated n-grams, last tokens of bad words."""
    p, token_ids = context.params, context.token_ids
    banned = set(p.end_token_ids) if _may_not_end(context, num_unknown) else set()
    for word in p.bad_words:
        if _ends_with(token_ids, word[:-1]):
            banned.add(word[-1])
    if p.no_repeat_ngram_size:
        context.ngrams = context.ngrams or NgramIndex(p.no_repeat_ngram_size)
        banned.update(context.ngrams.followers(token_ids))
    return banned


def _ends_with(token_ids: list[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == end

"""Logits processing of all rows: biases, penalties, DRY, allowed tokens, bans, forced tokens, guides, in this order.

It changes only the affected tokens. On a GPU it does not synchronise, and a row's last token may be on the GPU only.
Dimensions: R rows, V vocabulary entries.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from kernels.mask_logits import mask_logits
from pipelines.engine.dry import penalties as dry_penalties
from pipelines.engine.ngrams import NgramIndex
from pipelines.engine.request import SamplingContext
from pipelines.engine.token_counts import TokenCounts

TYPE_CODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def waits_for_tokens(context: SamplingContext) -> bool:
    """Return whether the CPU needs the last token: for no_repeat_ngram_size, DRY, banned or biased sequences, a guide,
    or reasoning at its limit.
    """
    p = context.params
    sequences = (*p.bad_words, *(ids for ids, _ in p.sequence_bias))
    if (
        p.no_repeat_ngram_size
        or p.dry_multiplier
        or context.guide
        or (context.thinking and context.thinking.depends_on_next)
    ):
        return True
    return any(len(ids) > 1 for ids in sequences)


def process_logits(logits: Tensor, contexts: Sequence[SamplingContext], last_tokens: Tensor | None = None) -> Tensor:
    """Return processed logits [R, V], float32, in a copy. Banned tokens have -inf.

    Returns `logits` itself if no row requests processing. `last_tokens` int64 [R], on the logits' device: the token
    that follows each context's `token_ids`. It requires that `waits_for_tokens` is False for every row.
    """
    assert last_tokens is None or not any(map(waits_for_tokens, contexts))
    vocab_size, num_unknown = logits.shape[1], int(last_tokens is not None)
    if not any(_needs_processing(context, num_unknown) for context in contexts):
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
    dry = [(start + id, -penalty) for start, context, _ in rows for id, penalty in _dry(context) if id < vocab_size]
    if dry:
        places = to_device([place for place, _ in dry], torch.int64, device)
        flat.scatter_add_(0, places, to_device([penalty for _, penalty in dry], torch.float32, device))
    if restricted:
        allowed_ids = to_device(allowed, torch.int64, device)
        values = flat[allowed_ids]
        flat.view_as(logits).index_fill_(0, to_device(restricted, torch.int64, device), -torch.inf)
        flat.scatter_(0, allowed_ids, values)
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
    """Return the guides' bitmasks int32 [R, ceil(V / 32)]. Rows without a guide allow all tokens."""
    free = bytes([255]) * (4 * -(-vocab_size // 32))
    rows = bytearray(b"".join(context.guide.mask() if context.guide else free for context in contexts))
    masks = torch.frombuffer(rows, dtype=torch.int32).view(len(contexts), -1)
    return masks.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else masks


def to_device(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a one-dimensional tensor. For a GPU, the copy goes through pinned memory and does not synchronise.

    The values pass through an `array`, which is ten times faster than torch's conversion of a list.
    """
    numbers = array(TYPE_CODES[dtype], values)
    tensor = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _needs_processing(context: SamplingContext, num_unknown: int) -> bool:
    p = context.params
    biases = p.logit_bias or p.sequence_bias
    bans = p.allowed_token_ids or p.bad_words or p.no_repeat_ngram_size or context.guide
    return (
        bool(biases or bans or p.dry_multiplier or _forced(context, num_unknown))
        or _is_penalised(context)
        or _may_not_end(context, num_unknown)
    )


def _may_not_end(context: SamplingContext, num_unknown: int) -> bool:
    p = context.params
    return bool(p.end_token_ids) and context.num_output_tokens + num_unknown < p.min_new_tokens


def _biases(context: SamplingContext) -> Iterable[tuple[int, float]]:
    p = context.params
    yield from p.logit_bias.items()
    for ids, bias in p.sequence_bias:
        if _ends_with(context.token_ids, ids[:-1]):
            yield ids[-1], bias


def _forced(context: SamplingContext, num_unknown: int) -> tuple[int, ...]:
    """Return the token that closes the reasoning, else the tokens allowed as the output's first or last token.

    Empty if unrestricted. With a guide only the reasoning forces a token.
    """
    if context.thinking and (token := context.thinking.forced_token_id) is not None:
        return (token,)
    p, place = context.params, context.num_output_tokens + num_unknown
    if context.guide is not None:
        return ()
    last = p.last_token_ids if place == p.max_new_tokens - 1 else ()
    return last or (p.first_token_ids if place == 0 else ())


def _dry(context: SamplingContext) -> Iterable[tuple[int, float]]:
    p = context.params
    if not p.dry_multiplier:
        return ()
    settings = p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_penalty_last_n
    return dry_penalties(context.token_ids, p.dry_breakers, *settings).items()


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
    """Apply the penalties to flattened rows in place.

    The repetition penalty (arXiv 1909.05858) covers all tokens of a row; presence and frequency penalties cover its
    output only.
    """
    known = [_counts(contexts[row]) for row in penalised]
    listed = array("q"), array("q"), array("q")  # row index, token id, and number of times generated
    for row, token_counts in zip(penalised, known, strict=True):
        for numbers, more in zip(
            listed,
            (array("q", [row]) * len(token_counts.counts), token_counts.token_ids, token_counts.counts),
            strict=True,
        ):
            numbers += more
    rows, tokens, counts = (to_device(numbers, torch.int64, flat.device) for numbers in listed)
    if last_tokens is not None:  # add the last token: to its count if it is listed, else as a new entry
        penalised_rows = to_device(penalised, torch.int64, flat.device)
        again = tokens == last_tokens[rows]
        counts = counts + again
        new = torch.zeros_like(last_tokens).scatter_add_(0, rows, counts * again)[penalised_rows].clamp(min=1)
        rows, tokens = torch.cat((rows, penalised_rows)), torch.cat((tokens, last_tokens[penalised_rows]))
        counts = torch.cat((counts, new))
    settings = [context.params for context in contexts]
    penalties = chain.from_iterable((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in settings)
    repetition, presence, frequency = to_device(penalties, torch.float32, flat.device).view(-1, 3)[rows].T
    places = rows * vocab_size + tokens
    values = flat.gather(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= (presence + frequency * counts) * (counts > 0)
    flat.scatter_(0, places, values)  # duplicate indices write the same value


def _counts(context: SamplingContext) -> TokenCounts:
    if context.counts is None:
        context.counts = TokenCounts(context.num_prompt_tokens, with_prompt=context.params.repetition_penalty != 1)
    context.counts.update(context.token_ids)
    return context.counts


def _banned(context: SamplingContext, num_unknown: int) -> set[int]:
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

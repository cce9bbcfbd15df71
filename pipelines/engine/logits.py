"""What requests ask of their logits before tokens are chosen: logit_bias, penalties, allowed tokens, bans, in this order, all rows at once.

Only the tokens that something is done to are touched. On a GPU nothing waits for it, and a sequence's last token may be one that
only the GPU knows. R rows (one per sequence), V tokens in the vocabulary.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from pipelines.engine.ngrams import NgramIndex
from pipelines.engine.request import Sequence

TYPE_CODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def waits_for_tokens(sequence: Sequence) -> bool:
    """Whether bans depend on the last token, so that they are found on the CPU: repeated n-grams, and bad words of several tokens."""
    p = sequence.request.params
    return bool(p.no_repeat_ngram_size) or any(len(word) > 1 for word in p.bad_words)


def process_logits(logits: Tensor, sequences: list[Sequence], last_tokens: Tensor | None = None) -> Tensor:
    """Rows [R, V], float32, a copy; the same tensor where nobody asks for anything. A token that may not be chosen has -inf.

    `last_tokens` int64 [R], on the logits' device: the token behind those that each sequence lists; of sequences that need not wait for it.
    """
    assert last_tokens is None or not any(map(waits_for_tokens, sequences))
    vocab_size, num_unknown = logits.shape[1], int(last_tokens is not None)
    if not any(_asks_for_something(sequence, num_unknown) for sequence in sequences):
        return logits
    rows = [(row * vocab_size, sequence, sequence.request.params) for row, sequence in enumerate(sequences)]
    biases = [(start + id, bias) for start, _, p in rows for id, bias in p.logit_bias.items() if id < vocab_size]
    restricted = [row for row, (_, _, p) in enumerate(rows) if p.allowed_token_ids]
    allowed = [start + id for start, _, p in rows for id in p.allowed_token_ids if id < vocab_size]
    banned = [start + id for start, sequence, _ in rows for id in _banned(sequence, num_unknown) if id < vocab_size]
    penalised = [row for row, sequence in enumerate(sequences) if _is_penalised(sequence)]
    flat, device = logits.to(torch.float32, copy=True).flatten(), logits.device
    if biases:
        places = to_device([place for place, _ in biases], torch.int64, device)
        flat.scatter_add_(0, places, to_device([bias for _, bias in biases], torch.float32, device))
    if penalised:
        _penalise(flat, vocab_size, sequences, penalised, last_tokens)
    if restricted:
        kept = to_device(allowed, torch.int64, device)
        values = flat[kept]
        flat.view_as(logits).index_fill_(0, to_device(restricted, torch.int64, device), -torch.inf)
        flat.scatter_(0, kept, values)
    if banned:
        flat.index_fill_(0, to_device(banned, torch.int64, device), -torch.inf)
    return flat.view_as(logits)


def to_device(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One-dimensional; through pinned memory where that is a GPU, so that nothing waits for it.

    An array is read ten times faster than torch reads a list.
    """
    numbers = array(TYPE_CODES[dtype], values)
    tensor = torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _asks_for_something(sequence: Sequence, num_unknown: int) -> bool:
    p = sequence.request.params
    asked = p.logit_bias or p.allowed_token_ids or p.bad_words or p.no_repeat_ngram_size
    return bool(asked) or _is_penalised(sequence) or _may_not_end(sequence, num_unknown)


def _may_not_end(sequence: Sequence, num_unknown: int) -> bool:
    """Though there are tokens that would end it."""
    p = sequence.request.params
    return bool(p.end_token_ids) and sequence.num_output_tokens + num_unknown < p.min_new_tokens


def _is_penalised(sequence: Sequence) -> bool:
    p = sequence.request.params
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _penalise(
    flat: Tensor, vocab_size: int, sequences: list[Sequence], penalised: list[int], last_tokens: Tensor | None
) -> None:
    """In place, flattened rows. Repetition (arXiv 1909.05858) is for all tokens of a sequence, presence and frequency for its output."""
    of_rows, said, times = list[int](), list[int](), list[int]()  # tokens of rows, and how often each was generated
    for row in penalised:
        p = sequences[row].request.params
        generated = Counter(sequences[row].output_token_ids if p.presence_penalty or p.frequency_penalty else ())
        touched = set(generated if p.repetition_penalty == 1 else sequences[row].token_ids)
        of_rows += [row] * len(touched)
        said += touched
        times += map(generated.__getitem__, touched)
    rows, tokens, counts = (to_device(each, torch.int64, flat.device) for each in (of_rows, said, times))
    if last_tokens is not None:  # one more of a token that is listed, or one that is not
        own = to_device(penalised, torch.int64, flat.device)
        again = tokens == last_tokens[rows]
        counts = counts + again
        new = torch.zeros_like(last_tokens).scatter_add_(0, rows, counts * again)[own].clamp(min=1)
        rows, tokens = torch.cat((rows, own)), torch.cat((tokens, last_tokens[own]))
        counts = torch.cat((counts, new))
    settings = [sequence.request.params for sequence in sequences]
    each = chain.from_iterable((p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in settings)
    repetition, presence, frequency = to_device(each, torch.float32, flat.device).view(-1, 3)[rows].T
    places = rows * vocab_size + tokens
    values = flat.gather(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= (presence + frequency * counts) * (counts > 0)
    flat.scatter_(0, places, values)  # into a place that is there twice, the same number


def _banned(sequence: Sequence, num_unknown: int) -> set[int]:
    """Tokens that may not follow: ends before the minimum length, repeated n-grams, last tokens of bad words."""
    p, token_ids = sequence.request.params, sequence.token_ids
    banned = set(p.end_token_ids) if _may_not_end(sequence, num_unknown) else set()
    for word in p.bad_words:
        if _ends_with(token_ids, word[:-1]):
            banned.add(word[-1])
    if p.no_repeat_ngram_size:
        sequence.ngrams = sequence.ngrams or NgramIndex(p.no_repeat_ngram_size)
        banned.update(sequence.ngrams.followers(token_ids))
    return banned


def _ends_with(token_ids: list[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == end

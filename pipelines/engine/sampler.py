"""From logits to token ids: small pure functions, composed in `sample`.

R rows (one per sequence), V tokens in the vocabulary. Logits are float32; a token that may not be chosen has -inf.
Order: logit_bias, penalties, bans, temperature, top_k, top_p, min_p.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.sampling import draw
from pipelines.engine.request import Sequence, TokenLogprobs

MASK64 = 2**64 - 1


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int | None]:
    """A token id per row of logits [R, V], None where all are banned. Temperature 0 takes the most likely, the lowest id of equals."""
    logits = logits.float()
    changed = [row for row, sequence in enumerate(sequences) if changes_logits(sequence)]
    if changed:
        logits = logits.clone()  # the caller's stay unmodified, for the log probabilities
        for row in changed:
            logits[row] = process_logits(logits[row], sequences[row])
    chosen: list[int | None] = choose(logits, sequences).tolist()
    for row in changed:
        if logits[row].amax() == -torch.inf:
            chosen[row] = None
    return chosen


def choose(logits: Tensor, sequences: list[Sequence], num_unknown: int = 0) -> Tensor:
    """The token [R] of each row of processed logits [R, V]. `num_unknown`: output tokens of each sequence that it does not list yet."""
    logits = logits.float()
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.params.temperature > 0]
    if len(rows) == len(sequences):
        return _draw_rows(logits, sequences, num_unknown)
    tokens = logits.argmax(-1)
    if rows:
        tokens[rows] = _draw_rows(logits[rows], [sequences[row] for row in rows], num_unknown)
    return tokens


def _draw_rows(logits: Tensor, sequences: list[Sequence], num_unknown: int) -> Tensor:
    rows = []
    for sequence in sequences:
        p = sequence.request.params
        number = uniform(_sample_seed(sequence), sequence.num_output_tokens + num_unknown)
        rows.append((p.temperature, p.top_k, p.top_p, p.min_p, number))
    settings = torch.tensor(rows, dtype=torch.float64)
    if logits.is_cuda:  # pinned, so that nothing waits for the GPU
        settings = settings.pin_memory().to(logits.device, non_blocking=True)
    return draw(logits, settings)


def changes_logits(sequence: Sequence) -> bool:
    """Whether the sequence's next token depends on more than the model's logits."""
    p = sequence.request.params
    return bool(
        p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or p.no_repeat_ngram_size
        or p.bad_words
        or p.allowed_token_ids
        or (p.end_token_ids and sequence.num_output_tokens < p.min_new_tokens)
    )


def process_logits(logits: Tensor, sequence: Sequence) -> Tensor:
    """One row [V], float32, after logit_bias, the penalties for what was said, and the bans."""
    p = sequence.request.params

    def ids(values: Iterable[int]) -> Tensor:
        known = [value for value in values if value < logits.shape[0]]
        return torch.tensor(known, dtype=torch.int64, device=logits.device)

    logits = logits.clone()
    if p.logit_bias:
        logits[ids(p.logit_bias)] += torch.tensor(list(p.logit_bias.values()), device=logits.device)
    if p.repetition_penalty != 1:
        seen = ids(set(sequence.token_ids))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        tokens, counts = ids(sequence.output_token_ids).unique(return_counts=True)
        logits[tokens] -= p.presence_penalty + p.frequency_penalty * counts
    if p.allowed_token_ids:
        allowed = ids(p.allowed_token_ids)
        logits = torch.full_like(logits, -torch.inf).index_copy(0, allowed, logits[allowed])
    logits[ids(_banned(sequence))] = -torch.inf
    return logits


def _banned(sequence: Sequence) -> set[int]:
    """Tokens that may not follow: ends before the minimum length, repeated n-grams, last tokens of bad words."""
    p, token_ids = sequence.request.params, sequence.token_ids
    banned = set(p.end_token_ids) if sequence.num_output_tokens < p.min_new_tokens else set()
    for word in p.bad_words:
        if _ends_with(token_ids, word[:-1]):
            banned.add(word[-1])
    if size := p.no_repeat_ngram_size:
        before = token_ids[len(token_ids) - size + 1 :]
        starts = range(len(token_ids) - size + 1)
        banned |= {token_ids[i + size - 1] for i in starts if token_ids[i : i + size - 1] == before}
    return banned


def _ends_with(token_ids: list[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(token_ids[-len(end) :]) == end


def uniform(seed: int, step: int) -> float:
    """The step-th number in [0, 1) of the seed's SplitMix64 stream (Steele, Lea, Flood 2014).

    A function of seed and step alone: the same on every device, in every batch, after every preemption. 52 bits, so that the
    product with a total in float64 stays below the total. Because every device inverts the distribution at this number, the same logits
    give the same token everywhere, but for what rounding moves across a limit; noise added to the logits (Gumbel-max) would not.
    """
    start = _mix(seed)
    return (_mix(start + (step + 1) * 0x9E3779B97F4A7C15) >> 12) / 2**52


def _sample_seed(sequence: Sequence) -> int:
    """Each of a request's n samples has its own stream; the first one's is that of a request for one sample."""
    seed = sequence.request.params.seed
    return _mix(_mix(seed) ^ sequence.sample) if sequence.sample else seed


def _mix(x: int) -> int:
    x &= MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """From rows [R, V] of the model's own logits: log probabilities of each row's own token and of its `num_top` most likely ones."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])  # [R, 1]
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[-1]))
    result = []
    for token, value, rank, tokens, values in zip(
        token_ids, own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
    ):
        known = {token: rank} | {t: r for r, t in enumerate(tokens, 1)}
        result.append(TokenLogprobs({token: value} | dict(zip(tokens, values, strict=True)), known))
    return result

"""Chooses tokens from logits, with small pure functions.

Dimensions: R rows, V vocabulary entries. A banned token has the logit -inf. Order: bias, penalties, bans and guides
(logits.py), temperature, top_k, top_p, min_p; truncation.py has the order with its further settings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling import draw, most_likely
from pipelines.engine.logits import process_logits, to_device
from pipelines.engine.request import SamplingContext, TokenLogprobs
from pipelines.engine.truncation import draw_truncated, truncates

MASK64 = 2**64 - 1
NO_TOKEN = -1
XTC = 0x585443
"""Changes the seed for the numbers that switch XTC on, so that they do not depend on those that choose tokens."""


def sample(logits: Tensor, contexts: Sequence[SamplingContext]) -> list[int | None]:
    """Return a token id for each row of the model's logits [R, V]; None where all tokens are banned."""
    return known_tokens(choose(logits, contexts))


def known_tokens(tokens: Tensor) -> list[int | None]:
    """Convert the tensor of `choose` to a list, with None where all tokens were banned. Waits for the GPU."""
    return [None if token == NO_TOKEN else token for token in tokens.tolist()]


def choose(logits: Tensor, contexts: Sequence[SamplingContext], last_tokens: Tensor | None = None) -> Tensor:
    """Return a token int64 [R] for each row of the model's logits [R, V], without waiting for a GPU.

    NO_TOKEN where all tokens are banned. Temperature 0 takes the most likely token, and the lowest id of equal ones.
    `last_tokens`: as for `process_logits`.
    """
    processed = process_logits(logits, contexts, last_tokens)
    tokens = _choose(processed, contexts, int(last_tokens is not None))
    if processed is logits:
        return tokens
    chosen = processed.gather(1, tokens.clamp(max=logits.shape[1] - 1)[:, None])[:, 0]  # V if all are banned
    return tokens.masked_fill(chosen == -torch.inf, NO_TOKEN)


def _choose(logits: Tensor, contexts: Sequence[SamplingContext], num_unknown: int) -> Tensor:
    """Choose from processed logits. `num_unknown`: output tokens of each row that its context does not contain yet."""
    drawn = [row for row, context in enumerate(contexts) if context.params.temperature > 0]
    if len(drawn) == len(contexts):
        return _draw_rows(logits, contexts, num_unknown)
    tokens = most_likely(logits)
    if drawn:
        rows = to_device(drawn, torch.int64, logits.device)
        tokens.index_copy_(0, rows, _draw_rows(logits[rows], [contexts[row] for row in drawn], num_unknown))
    return tokens


def _draw_rows(logits: Tensor, contexts: Sequence[SamplingContext], num_unknown: int) -> Tensor:
    further = [row for row, context in enumerate(contexts) if truncates(context.params)]
    if not further:
        return _draw_plain(logits, contexts, num_unknown)
    tokens = torch.empty(len(contexts), dtype=torch.int64, device=logits.device)
    plain = [row for row in range(len(contexts)) if row not in further]
    for numbers, draw_some in (plain, _draw_plain), (further, _draw_further):
        if numbers:
            rows = to_device(numbers, torch.int64, logits.device)
            tokens.index_copy_(0, rows, draw_some(logits[rows], [contexts[row] for row in numbers], num_unknown))
    return tokens


def _draw_further(logits: Tensor, contexts: Sequence[SamplingContext], num_unknown: int) -> Tensor:
    numbers: list[float] = []
    for context in contexts:
        step = context.num_output_tokens + num_unknown
        numbers += next_uniform(context, num_unknown), uniform(_mix(_sample_seed(context) ^ XTC), step)
    uniforms = to_device(numbers, torch.float64, logits.device).view(-1, 2)
    return draw_truncated(logits, [context.params for context in contexts], uniforms)


def _draw_plain(logits: Tensor, contexts: Sequence[SamplingContext], num_unknown: int) -> Tensor:
    settings: list[float] = []
    for context in contexts:
        p = context.params
        number = next_uniform(context, num_unknown)
        settings += p.temperature, p.top_k, p.top_p, p.min_p, number
    return draw(logits.float(), to_device(settings, torch.float64, logits.device).view(-1, 5))


def next_uniform(context: SamplingContext, num_unknown: int = 0) -> float:
    """Return the row's random number in [0, 1) for its next token, or for the token `num_unknown` tokens later."""
    return uniform(_sample_seed(context), context.num_output_tokens + num_unknown)


def uniform(seed: int, step: int) -> float:
    """Return number `step` in [0, 1) of the seed's SplitMix64 stream (Steele, Lea, Flood 2014).

    It depends only on seed and step: it is equal on every device, in every batch, after every preemption. It has 52
    bits, so that its product with a float64 total stays below the total. Every device inverts the distribution at this
    number, so equal logits give equal tokens everywhere, except where rounding moves the number across a boundary.
    Noise added to the logits (Gumbel-max) would not have this property.
    """
    start = _mix(seed)
    return (_mix(start + (step + 1) * 0x9E3779B97F4A7C15) >> 12) / 2**52


def _sample_seed(context: SamplingContext) -> int:
    """Return the seed of the row's stream.

    Each of a request's n samples has its own; the first sample's is the request's seed.
    """
    seed = context.params.seed
    return _mix(_mix(seed) ^ context.sample) if context.sample else seed


def _mix(x: int) -> int:
    x &= MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return log probabilities of each row's token and its `num_top` most likely tokens.

    `logits` [R, V]: the model's own, not processed.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])  # [R, 1]
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[-1]))
    result = []
    for token, value, rank, tokens, values in zip(
        token_ids, chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
    ):
        known = {token: rank} | {t: r for r, t in enumerate(tokens, 1)}
        result.append(TokenLogprobs({token: value} | dict(zip(tokens, values, strict=True)), known))
    return result

"""From logits to token ids: small pure functions, composed in `sample`.

R rows (one per sequence), V tokens in the vocabulary. A token that may not be chosen has the logit -inf.
Order: what logits.py does, temperature, top_k, top_p, min_p.
"""

import torch
from torch import Tensor

from kernels.sampling import draw, most_likely
from pipelines.engine.logits import process_logits, to_device
from pipelines.engine.request import Sequence, TokenLogprobs

MASK64 = 2**64 - 1
NO_TOKEN = -1


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int | None]:
    """A token id per row of the model's logits [R, V], None where all are banned."""
    return list(map(known_token, choose(logits, sequences).tolist()))


def known_token(token: int) -> int | None:
    return None if token == NO_TOKEN else token


def choose(logits: Tensor, sequences: list[Sequence], last_tokens: Tensor | None = None) -> Tensor:
    """The token [R] of each row of the model's logits [R, V], NO_TOKEN where all are banned. Temperature 0 takes the most likely,
    the lowest id of equals. `last_tokens`: as for `process_logits`."""
    processed = process_logits(logits, sequences, last_tokens)
    tokens = _choose(processed, sequences, int(last_tokens is not None))
    return tokens if processed is logits else tokens.masked_fill(processed.amax(-1) == -torch.inf, NO_TOKEN)


def _choose(logits: Tensor, sequences: list[Sequence], num_unknown: int) -> Tensor:
    """`num_unknown`: output tokens of each sequence that it does not list yet."""
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.params.temperature > 0]
    if len(drawn) == len(sequences):
        return _draw_rows(logits, sequences, num_unknown)
    tokens = most_likely(logits)
    if drawn:
        rows = to_device(drawn, torch.int64, logits.device)
        tokens.index_copy_(0, rows, _draw_rows(logits[rows], [sequences[row] for row in drawn], num_unknown))
    return tokens


def _draw_rows(logits: Tensor, sequences: list[Sequence], num_unknown: int) -> Tensor:
    settings: list[float] = []
    for sequence in sequences:
        p = sequence.request.params
        number = uniform(_sample_seed(sequence), sequence.num_output_tokens + num_unknown)
        settings += p.temperature, p.top_k, p.top_p, p.min_p, number
    return draw(logits.float(), to_device(settings, torch.float64, logits.device).view(-1, 5))


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

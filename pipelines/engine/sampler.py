"""From logits to token ids: small pure functions, composed in `sample`.

R rows (one per sequence), V tokens in the vocabulary. Logits are float32 (float64 for drawing); a token that may not be chosen has -inf.
Order: penalties, temperature, top_k, top_p, min_p.
"""

import torch
from torch import Tensor

from conf.errors import UserError
from pipelines.engine.request import Sequence, TokenLogprobs

MASK64 = 2**64 - 1


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """One token id per row of logits [R, V]. Temperature 0 takes the most likely token, the lowest id among equals."""
    logits = logits.float()
    if not logits.amax(-1).isfinite().all():
        remedy = "the weights are damaged, or model.dtype=float16 is too small for them: try model.dtype=float32"
        raise UserError(f"the model's logits are not finite: {remedy}")
    changed = [row for row, sequence in enumerate(sequences) if _changes_logits(sequence)]
    if changed:
        logits = logits.clone()  # the caller's stay unmodified, for the log probabilities
        for row in changed:
            logits[row] = penalised(logits[row], sequences[row])
    tokens = logits.argmax(-1)
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.params.temperature > 0]
    if rows:
        tokens[rows] = _draw_rows(logits[rows], [sequences[row] for row in rows])
    return tokens.tolist()  # type: ignore[no-any-return]


def _draw_rows(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    params = [sequence.request.params for sequence in sequences]

    def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=logits.device)[:, None]  # [R, 1]

    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / column("temperature")  # the largest stays 0, however cold
    if any(p.top_k for p in params):
        logits = keep_top_k(logits, column("top_k", torch.int64))
    if any(p.top_p < 1 for p in params):
        logits = keep_top_p(logits, column("top_p"))
    if any(p.min_p for p in params):
        logits = keep_min_p(logits, column("min_p"))
    uniforms = [uniform(s.request.params.seed, s.num_output_tokens) for s in sequences]
    return draw(logits, torch.tensor(uniforms, dtype=torch.float64, device=logits.device))


def _changes_logits(sequence: Sequence) -> bool:
    p = sequence.request.params
    return (
        p.repetition_penalty != 1
        or p.presence_penalty != 0
        or p.frequency_penalty != 0
        or sequence.num_output_tokens < p.min_new_tokens
    )


def penalised(logits: Tensor, sequence: Sequence) -> Tensor:
    """One row [V] after repetition penalty (prompt and output), presence and frequency penalties (output), and the minimum length."""
    p = sequence.request.params
    logits = logits.clone()
    if p.repetition_penalty != 1:
        seen = torch.tensor(sequence.token_ids, device=logits.device).unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if output and (p.presence_penalty or p.frequency_penalty):
        tokens, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
        logits[tokens] -= p.presence_penalty + p.frequency_penalty * counts
    if sequence.num_output_tokens < p.min_new_tokens:
        ends = [token for token in p.stop_token_ids | p.eos_token_ids if token < logits.shape[0]]
        logits[torch.tensor(ends, dtype=torch.int64, device=logits.device)] = -torch.inf
    return logits


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep each row's k most likely tokens (and those equal to the last of them); k [R, 1] int64, 0 keeps all."""
    vocab_size = logits.shape[-1]
    largest = logits.topk(min(int(k.max()), vocab_size)).values  # [R, max k]
    threshold = largest.gather(-1, k.clamp(1, largest.shape[-1]) - 1)
    return logits.masked_fill((logits < threshold) & (k > 0), -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep each row's most likely tokens up to and including the one that brings their probability to p [R, 1] (arXiv 1904.09751)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what the more likely tokens have together
    dropped = (before >= p) & (p < 1)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least min_p [R, 1] times as likely as the row's most likely one (arXiv 2407.01082)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [R] by inverting each row's distribution function at uniforms [R] float64 in [0, 1)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]


def uniform(seed: int, step: int) -> float:
    """The step-th number in [0, 1) of the seed's SplitMix64 stream (Steele, Lea, Flood 2014).

    A function of seed and step alone: the same on every device, in every batch, after every preemption. 52 bits, so that the
    product with a total in float64 stays below the total.
    """
    start = _mix(seed)
    return (_mix(start + (step + 1) * 0x9E3779B97F4A7C15) >> 12) / 2**52


def _mix(x: int) -> int:
    x &= MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """From one row [V] of the model's own logits: the chosen token's log probability and those of the `num_top` most likely."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, logprobs.shape[0]))
    values = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    ranks = {token: rank for rank, token in enumerate(values, 1)}
    if token_id not in values:
        values[token_id] = logprobs[token_id].item()
        ranks[token_id] = int((logprobs > logprobs[token_id]).sum()) + 1
    return TokenLogprobs(values, ranks)

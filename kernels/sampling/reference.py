"""R rows (one per sequence), V tokens in the vocabulary. A banned token has the logit -inf."""

import torch
from torch import Tensor


def most_likely(logits: Tensor) -> Tensor:
    """Return the token id int64 [R] of each row's highest logit [R, V]; of equal logits the lowest id. Logits must not
    be NaN."""
    return logits.float().argmax(-1)


def draw(logits: Tensor, settings: Tensor) -> Tensor:
    """Return a token id per row, int64 [R]. logits float32 [R, V]. settings float64 [R, 5], per row: temperature (above
    0), top_k (0: off), top_p (1: off), min_p (0: off), and a uniform number in [0, 1).

    The draw inverts the cumulative distribution function, in the order of token ids. It depends only on the row and its
    uniform number. Arithmetic is float64.
    """
    temperature, top_k, top_p, min_p, uniforms = settings.split(1, dim=1)  # [R, 1] each
    wide = logits.double()
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature  # the largest stays 0 at any temperature
    if top_k.any():
        scaled = keep_top_k(scaled, top_k.long())
    if (top_p < 1).any():
        scaled = keep_top_p(scaled, top_p)
    if min_p.any():
        scaled = keep_min_p(scaled, min_p)
    return invert(scaled, uniforms[:, 0])


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep each row's k most likely tokens, and tokens as likely as the last of them. k [R, 1] int64; 0 keeps all."""
    vocab_size = logits.shape[-1]
    largest = logits.topk(min(int(k.max()), vocab_size)).values  # [R, max k]
    threshold = largest.gather(-1, k.clamp(1, largest.shape[-1]) - 1)
    return logits.masked_fill((logits < threshold) & (k > 0), -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep each row's most likely tokens, up to and including the token at which their probabilities sum to p [R, 1]
    (arXiv 1904.09751). If tokens are equally likely, the lowest id is first."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # sum over the more likely tokens
    dropped = (before >= p) & (p < 1)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens that are at least min_p [R, 1] times as likely as the row's most likely token (arXiv 2407.01082)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def invert(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return token ids [R]: invert each row's cumulative distribution function at uniforms [R] float64 in [0, 1)."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]

"""R rows (one per sequence), V tokens in the vocabulary."""

import torch
from torch import Tensor

GAMMA, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = 40  # of a uniform number: the likeliest token of 2^17 still differs from the next


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, steps: Tensor
) -> Tensor:
    """A token id per row, int64 [R]; -1 where all tokens are banned. A token that may not be chosen has the logit -inf.

    logits [R, V] float32; temperature, top_p (1: off) and min_p (0: off) float32 [R]; top_k int64 [R], 0 keeps all; seeds int64 [R], of
    which the 64 bits count; steps int64 [R]. Temperature 0 takes the likeliest token, the lowest id of equals.

    The draw is the largest of logit + Gumbel noise (Gumbel 1954): a function of the row, its seed and its step alone.
    """
    cold = temperature == 0
    scaled = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature.double().where(~cold, 1)[:, None]
    noisy = scaled.masked_fill(~kept_tokens(scaled, top_k, top_p, min_p), -torch.inf) + gumbel(
        seeds, steps, logits.shape[1]
    )
    tokens = torch.where(cold, logits.argmax(-1), noisy.argmax(-1))
    return tokens.where(logits.amax(-1) > -torch.inf, -1)


def kept_tokens(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, V]: the top_k likeliest and those equal to the last of them; of these the likeliest, the lowest id of equals first, up to
    the one that brings their probability to top_p (arXiv 1904.09751); of these those at least min_p times as likely as the likeliest
    (arXiv 2407.01082). scaled float64 [R, V]."""
    vocab_size = scaled.shape[1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)[:, None] - 1
    among = ordered >= ordered.gather(-1, last)  # the top_k
    probabilities = ordered.masked_fill(~among, -torch.inf).softmax(-1)
    among &= (probabilities.cumsum(-1) - probabilities < top_p.double()[:, None]) | (top_p[:, None] >= 1)
    among &= probabilities >= min_p.double()[:, None] * probabilities[:, :1]
    return torch.zeros_like(among).scatter(-1, order, among)


def gumbel(seeds: Tensor, steps: Tensor, vocab_size: int) -> Tensor:
    """float64 [R, V]: -log(-log(1 - u)), where u is number v of the SplitMix64 stream (Steele, Lea, Flood 2014) whose seed is number
    `steps` of the stream of `seeds`."""
    token = torch.arange(1, vocab_size + 1, device=seeds.device)
    keys = _mix(_mix(seeds) + (steps + 1) * _signed(GAMMA))  # [R]
    bits = _shift(_mix(keys[:, None] + token * _signed(GAMMA)), 64 - BITS)
    return -(-torch.log1p(-(bits.double() + 0.5) / 2**BITS)).log()


def penalize(
    logits: Tensor, counts: Tensor, prompted: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits [R, V] float32 after the penalties for what was said.

    counts int32 [R, V]: how often each token was generated; prompted bool [R, V]: whether it is in the prompt. The penalties are float32
    [R]; repetition (arXiv 1909.05858; 1: off) is for both, presence and frequency (0: off) for what was generated.
    """
    divided = torch.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None])
    logits = torch.where(prompted | (counts > 0), divided, logits)
    return logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts


def _mix(x: Tensor) -> Tensor:
    """int64, taken as 64 bits without a sign."""
    x = (x ^ _shift(x, 30)) * _signed(FIRST_FACTOR)
    x = (x ^ _shift(x, 27)) * _signed(SECOND_FACTOR)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(x: int) -> int:
    return x - 2**64

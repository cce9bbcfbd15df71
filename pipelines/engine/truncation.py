"""Temperatures and truncations that the sampling kernel does not have: dynamic temperature, top-n-sigma, typical_p, XTC.

Order: temperature, top_n_sigma, top_k, typical_p, top_p, min_p, XTC. Arithmetic is float64, and sums add in the order of
the tokens, so that a row's bits do not depend on the other rows. R rows, V vocabulary entries.
"""

import torch
from torch import Tensor

from kernels.sampling.reference import invert, keep_min_p, keep_top_k, keep_top_p
from pipelines.engine.request import SamplingParams

MOST_XTC_THRESHOLD = 0.5
"""At most one token is more likely, so XTC would drop none."""
SMALLEST_TEMPERATURE = 1e-9


def truncates(p: SamplingParams) -> bool:
    """Return whether the row needs this module instead of the kernel."""
    drops_likely = p.xtc_probability > 0 and p.xtc_threshold <= MOST_XTC_THRESHOLD
    return p.dynatemp_range > 0 or p.top_n_sigma > 0 or p.typical_p < 1 or drops_likely


def draw_truncated(logits: Tensor, rows: list[SamplingParams], uniforms: Tensor) -> Tensor:
    """Return a token int64 [R] for each row of `logits` [R, V], as `kernels.sampling.draw` does.

    `uniforms` float64 [R, 2] in [0, 1): the number that chooses the token, and the number that switches XTC on.
    """

    def column(name: str) -> Tensor:
        return torch.tensor([[getattr(p, name)] for p in rows], dtype=torch.float64, device=logits.device)

    wide = logits.double()
    wide = wide - wide.amax(-1, keepdim=True)
    temperature = column("temperature")
    wide = wide / _dynamic(wide, temperature, column("dynatemp_range"), column("dynatemp_exponent"))
    wide = _keep_top_n_sigma(wide, column("top_n_sigma"))
    if any(p.top_k for p in rows):
        wide = keep_top_k(wide, column("top_k").long())
    wide = _keep_typical(wide, column("typical_p"))
    wide = keep_min_p(keep_top_p(wide, column("top_p")), column("min_p"))
    is_on = uniforms[:, 1:] <= column("xtc_probability")
    threshold = column("xtc_threshold").masked_fill(~is_on | (column("xtc_probability") == 0), 1.0)
    return invert(_drop_most_likely(wide, threshold), uniforms[:, 0])


def _total(values: Tensor) -> Tensor:
    """Return the sum of each row [R, 1], added in order."""
    return values.cumsum(-1)[:, -1:]


def _dynamic(logits: Tensor, temperature: Tensor, width: Tensor, exponent: Tensor) -> Tensor:
    """Return temperatures [R, 1] that grow with the entropy of each row.

    As in llama.cpp: low + (high - low) * (entropy / log(tokens)) ** exponent, where low and high
    are `width` [R, 1] below (but not below 0) and above `temperature`.
    """
    allowed = logits.isfinite().sum(-1, keepdim=True).double()
    entropy = _total(torch.special.entr(logits.softmax(-1)))
    low, high = (temperature - width).clamp(min=0), temperature + width
    share = (entropy / allowed.log()).clamp(0, 1).masked_fill(allowed == 1, 0)
    dynamic = low + (high - low) * share**exponent
    return torch.where(width > 0, dynamic, temperature).clamp(min=SMALLEST_TEMPERATURE)


def _keep_top_n_sigma(logits: Tensor, n: Tensor) -> Tensor:
    """Keep tokens whose logit is at most n [R, 1] standard deviations below the highest (arXiv 2411.07641).

    The standard deviation covers the finite logits. n <= 0 keeps all tokens.
    """
    is_finite = logits.isfinite()
    values, count = logits.masked_fill(~is_finite, 0), is_finite.sum(-1, keepdim=True)
    mean = _total(values) / count
    deviation = (_total((values - mean).square().masked_fill(~is_finite, 0)) / count).sqrt()
    lowest = logits.amax(-1, keepdim=True) - n * deviation
    return logits.masked_fill((logits < lowest) & (n > 0), -torch.inf)


def _keep_typical(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the tokens whose surprise is closest to the entropy, until their probabilities sum to p [R, 1] (arXiv
    2202.00666). Of equally close tokens, the lowest id is first."""
    probabilities = logits.softmax(-1)
    entropy = _total(torch.special.entr(probabilities))
    distances, order = (-probabilities.log() - entropy).abs().sort(stable=True, dim=-1)
    ordered = probabilities.gather(-1, order)
    dropped = (ordered.cumsum(-1) - ordered >= p) & (p < 1) & distances.isfinite()
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def _drop_most_likely(logits: Tensor, threshold: Tensor) -> Tensor:
    """Drop the tokens that are at least as likely as threshold [R, 1], except the least likely of them (XTC, "exclude
    top choices", pull request 6335 of text-generation-webui). Of equally likely tokens, the highest id stays."""
    probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    is_likely = probabilities >= threshold
    places = torch.arange(logits.shape[-1], device=logits.device)
    dropped = places < is_likely.sum(-1, keepdim=True) - 1
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)

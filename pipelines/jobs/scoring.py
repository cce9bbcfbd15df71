"""Score how well a model predicts given tokens: their log likelihood, and the divergence from a reference model.

Dimensions: R scored tokens, V vocabulary entries, E hidden channels (of each model). Logarithms are natural.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from pipelines.engine import Engine
from pipelines.engine.operations import finite_logits

LOGIT_ROWS = 256  # rows of logits at a time: [R, V] of a whole step may be larger than the model


@dataclass(frozen=True)
class Window:
    """Tokens that a model sees at once.

    The last `num_scored` tokens are scored, each predicted from all tokens before it.
    """

    token_ids: list[int]
    num_scored: int


def sliding_windows(token_ids: list[int], window: int, stride: int) -> list[Window]:
    """Return windows of at most `window` tokens that begin every `stride` tokens.

    Each window scores the tokens that no earlier window scored, as in "Perplexity of fixed-length models" of
    transformers. A window's first token has no context and is not scored. With stride < window only the text's first
    token is not scored.
    """
    windows, scored = [], 0
    for start in range(0, len(token_ids), stride):
        window_ids = token_ids[start : start + window]
        end = start + len(window_ids)
        if num_scored := end - max(scored, start + 1):
            windows.append(Window(window_ids, num_scored))
        scored = end
        if end == len(token_ids):
            break
    return windows


@dataclass(frozen=True)
class Divergence:
    """How a window's predictions differ from a reference model's."""

    kl: Tensor
    """KL(reference || model) of each scored token in nats, float64 [R]."""
    num_agreed: int
    """Scored tokens for which both models have the same most likely token."""


@dataclass(frozen=True)
class WindowScore:
    nll: float
    """Negative log likelihood of the scored tokens in nats, their sum."""
    num_tokens: int
    divergence: Divergence | None
    """None without a reference model."""


@dataclass(frozen=True)
class Scores:
    """The scores of all windows, in order. The reference's metrics are None without a reference model."""

    windows: list[WindowScore]

    @property
    def num_tokens(self) -> int:
        return sum(window.num_tokens for window in self.windows)

    @property
    def nll(self) -> float:
        return math.fsum(window.nll for window in self.windows)

    @property
    def nll_per_token(self) -> float:
        return self.nll / self.num_tokens

    @property
    def perplexity(self) -> float | None:
        return perplexity(self.nll_per_token)

    @property
    def divergences(self) -> list[Divergence]:
        """One per window, or none without a reference model."""
        return [window.divergence for window in self.windows if window.divergence]

    @property
    def kl_mean(self) -> float | None:
        kl = self._kl
        return None if kl is None else kl.mean().item()

    @property
    def kl_p99(self) -> float | None:
        """Return the 99th percentile over tokens, interpolated as numpy does."""
        kl = self._kl
        return None if kl is None else float(np.quantile(kl.numpy(), 0.99))

    @property
    def top1_agreement(self) -> float | None:
        """Return the share, from 0 to 1, of tokens for which both models have the same most likely token."""
        return sum(d.num_agreed for d in self.divergences) / self.num_tokens if self.divergences else None

    @property
    def _kl(self) -> Tensor | None:
        return torch.cat([d.kl for d in self.divergences]) if self.divergences else None


def perplexity(nll_per_token: float) -> float | None:
    """Return the perplexity; None if it exceeds the largest float."""
    try:
        return math.exp(nll_per_token)
    except OverflowError:
        return None


def score(
    engine: Engine,
    windows: list[Window],
    reference: Engine | None = None,
    on_step: Callable[[int], None] = lambda num_tokens: None,
) -> Scores:
    """Score the windows, with as many per step as both engines can take.

    `on_step` gets the number of tokens scored so far.

    The reference has the same vocabulary and device. Raises UserError for windows that do not fit in a step, and for
    logits that are not finite.
    """
    engines = [engine] if reference is None else [engine, reference]
    scores: list[WindowScore] = []
    for step in _steps(engines, windows):
        scores += _score_step(engines, step)
        on_step(sum(window.num_tokens for window in scores))
    return Scores(scores)


@dataclass(frozen=True)
class Likelihood:
    """The log likelihood of a window's scored tokens, and whether each is the most likely token."""

    log_likelihood: float
    is_greedy: bool


def likelihoods(engine: Engine, windows: list[Window]) -> list[Likelihood]:
    """Return the likelihood of each window. Raises UserError as `score` does."""
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i].token_ids))
    by_window: dict[int, Likelihood] = {}
    for step in _steps([engine], [windows[i] for i in order]) if windows else ():
        for likelihood in _likelihoods_of_step(engine, step):
            by_window[order[len(by_window)]] = likelihood
    return [by_window[i] for i in range(len(windows))]


def _steps(engines: list[Engine], windows: list[Window]) -> Iterator[list[Window]]:
    """Yield the windows in steps. Every engine can take so many windows of the maximum length in one step."""
    longest = max(len(window.token_ids) for window in windows)
    at_once = min(engine.num_at_once(longest) for engine in engines)
    if not at_once:
        limits = "device.max_batched_tokens, or than the KV cache holds"
        remedy = "give a smaller evaluate.window, or raise device.max_batched_tokens or device.kv_cache_memory"
        raise UserError(f"a window of {longest} tokens is more than {limits}: {remedy}")
    for start in range(0, len(windows), at_once):
        yield windows[start : start + at_once]


@torch.inference_mode()
def _likelihoods_of_step(engine: Engine, windows: list[Window]) -> list[Likelihood]:
    hidden, targets = _hidden(engine, windows), _targets(windows, engine.device)
    logs, greedy = [], []
    for start in range(0, len(targets), LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        logits = finite_logits(engine.executor, hidden[rows]).float()  # [R, V]
        logs.append(logits.log_softmax(-1).gather(-1, targets[rows, None])[:, 0])
        greedy.append(logits.argmax(-1) == targets[rows])
    counts = [window.num_scored for window in windows]
    parts = zip(torch.cat(logs).split(counts), torch.cat(greedy).split(counts), strict=True)
    return [
        Likelihood(logprobs.sum(dtype=torch.float64).item(), bool(is_greedy.all())) for logprobs, is_greedy in parts
    ]


def _hidden(engine: Engine, windows: list[Window]) -> Tensor:
    """Return the hidden states [R, E] that predict the windows' scored tokens.

    A window's last token predicts no token of the window, so it is not computed. Raises UserError for a token that the
    model does not have.
    """
    for window in windows:
        engine.requests.check_ids("token id of a text", window.token_ids)
    return engine.hidden_states(
        [window.token_ids[:-1] for window in windows], [window.num_scored for window in windows]
    )


def _targets(windows: list[Window], device: torch.device) -> Tensor:
    return torch.tensor([id for window in windows for id in window.token_ids[-window.num_scored :]], device=device)


@torch.inference_mode()
def _score_step(engines: list[Engine], windows: list[Window]) -> list[WindowScore]:
    hidden = [_hidden(engine, windows) for engine in engines]  # each [R, E]
    targets = _targets(windows, hidden[0].device)  # [R]
    nll, kl, agreed = list[Tensor](), list[Tensor](), list[Tensor]()
    for start in range(0, len(targets), LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        logits = [finite_logits(engine.executor, h[rows]).float() for engine, h in zip(engines, hidden, strict=True)]
        logprobs, *expected = [row.log_softmax(-1) for row in logits]  # float32 [R, V]
        nll.append(-logprobs.gather(-1, targets[rows, None])[:, 0].double().cpu())
        if expected:
            # Float32 differences are small and exact to about 1e-6. Float64 sums keep that precision.
            kl.append((expected[0].exp() * (expected[0] - logprobs)).sum(-1, dtype=torch.float64).cpu())
            agreed.append((logits[0].argmax(-1) == logits[1].argmax(-1)).cpu())
    counts = [window.num_scored for window in windows]
    divergences: list[Divergence | None] = [None] * len(windows)
    if kl:
        parts = zip(torch.cat(kl).split(counts), torch.cat(agreed).split(counts), strict=True)
        divergences = [Divergence(part, int(same.sum())) for part, same in parts]
    nlls = [part.sum().item() for part in torch.cat(nll).split(counts)]
    return [WindowScore(*values) for values in zip(nlls, counts, divergences, strict=True)]

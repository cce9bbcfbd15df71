"""Contrastive search (Su et al. 2022, arXiv 2202.06417): of the k most likely tokens, choose a token that is likely and
unlike the context.

score = (1 - alpha) * probability - alpha * (largest cosine similarity of its hidden state to an earlier token's)

A candidate's hidden state is known only after the candidate is computed. So the k candidates run as forks of the
sequence, and one fork stays. Dimensions: L tokens so far, k candidates, E hidden channels, V vocabulary entries.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels.linear import linear
from pipelines.engine.logits import process_logits
from pipelines.engine.request import Continuation, FinishReason, Sequence, SequenceGroup
from pipelines.engine.sampler import token_logprobs
from pipelines.engine.stopping import completion_of, extend_text


class ContrastiveSearch:
    """The candidates of one request for its next token, and the hidden states of its context."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._observed: list[Tensor] = []  # hidden states since the last choice
        self._context: Tensor | None = None  # [L, E] normalised hidden states of the context
        self._probabilities: Tensor | None = None  # [k] of the candidates; None before the first choice
        self._logits: Tensor | None = None  # [V] logits of the candidates

    def observe(self, hidden: Tensor) -> None:
        self._observed.append(hidden.clone())  # the next step overwrites it

    def restart(self, group: SequenceGroup) -> Sequence:
        """Return the sequence without its candidate. Hidden states and candidates are computed again."""
        sequence = group.sequences[0].fork()
        if self._probabilities is not None:
            sequence.token_ids.pop()
        sequence.block_hashes.clear()
        sequence.first_output_position = 0
        self._begin()
        return sequence

    def recompute(self, group: SequenceGroup) -> None:
        """Collect the hidden states of the context again. The candidates stay."""
        self._context = None
        group.sequences[0].first_output_position = 0

    def advance(self, group: SequenceGroup, logits: Tensor) -> list[Continuation]:
        directions = normalize(torch.cat(self._observed).float(), dim=-1)
        self._observed.clear()
        chosen = 0
        if self._context is None:
            num_candidates = len(group.sequences) if self._probabilities is not None else 0
            self._context, directions = directions.tensor_split([len(directions) - num_candidates])
        if self._probabilities is not None:
            alpha = group.request.params.penalty_alpha
            similarity = linear(directions, self._context).amax(-1)  # [k]
            chosen = int(((1 - alpha) * self._probabilities - alpha * similarity).argmax())
            self._context = torch.cat([self._context, directions[chosen : chosen + 1]])
            if reason := self._accept(group.sequences[chosen]):
                group.completions[0] = completion_of(group.sequences[chosen], reason)
                return []
        sequence = group.sequences[chosen]
        processed = process_logits(logits[chosen : chosen + 1].float(), [sequence])[0]
        num_allowed = int((processed > -torch.inf).sum())
        if not num_allowed:
            group.completions[0] = completion_of(sequence, FinishReason.no_token)
            return []
        self._logits = logits[chosen]
        self._probabilities, candidates = processed.softmax(-1).topk(min(group.request.params.top_k, num_allowed))
        return [Continuation(sequence, token) for token in candidates.tolist()]

    def _accept(self, sequence: Sequence) -> FinishReason | None:
        if (num_top := sequence.params.logprobs) is not None:
            assert self._logits is not None
            sequence.logprobs += token_logprobs(self._logits[None], sequence.token_ids[-1:], num_top)
        return extend_text(sequence)

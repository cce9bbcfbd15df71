"""A draft that grows token by token: what proposers share that compute logits."""

from dataclasses import replace

import torch
from torch import Tensor

from pipelines.engine.batch import NewTokens
from pipelines.engine.request import SamplingContext, Sequence
from pipelines.engine.sampler import sample


class Draft:
    """The guess of what follows a sequence: the most likely tokens, as its settings change logits."""

    def __init__(self, sequence: Sequence, most: int) -> None:
        self.sequence = sequence
        self._most = most
        self.token_ids: list[int] = []
        # Where a seed decides, the token that its own number draws is accepted more often of a model that is nearly the same,
        # and less often of any other (LOG).
        params = replace(sequence.params, temperature=0.0)
        self.context = SamplingContext(params, list(sequence.token_ids), sequence.num_prompt_tokens)
        """Of the token after the draft."""

    def add(self, token: int | None) -> bool:
        """Take the next token. Returns whether more are wanted: none after an end, or where all tokens are banned."""
        if token is None:
            return False
        self.token_ids.append(token)
        self.context.token_ids.append(token)
        return len(self.token_ids) < self._most and token not in self.context.params.end_token_ids

    def last(self, position: int = -1) -> NewTokens:
        """Return the last token as what is computed next, at its own position, or at one before it."""
        return NewTokens(self.sequence, len(self.context.token_ids) + position, self.token_ids[-1:], 1)


def grow(drafts: list[Draft], logits: Tensor) -> list[int]:
    """Add a token to each draft, from its row of logits [R, V]. Returns the numbers of those that want more."""
    if not drafts:
        return []
    finite = logits.nan_to_num(neginf=-torch.inf)  # what overflows is a bad guess, and no fault
    tokens = sample(finite, [draft.context for draft in drafts])
    return [i for i, (draft, token) in enumerate(zip(drafts, tokens, strict=True)) if draft.add(token)]

"""A draft that grows token by token, for proposers that compute logits."""

from dataclasses import replace

import torch
from torch import Tensor

from pipelines.engine.batch import NewTokens
from pipelines.engine.request import SamplingContext, Sequence
from pipelines.engine.sampler import sample


class Draft:
    """The draft tokens of a sequence: the most likely tokens after the request's logits processing."""

    def __init__(self, sequence: Sequence, most: int) -> None:
        self.sequence = sequence
        self._most = most
        self.token_ids: list[int] = []
        # Drafts are greedy also for sampled rows. Drawing with the row's own random number raises acceptance only for a
        # draft model that is nearly equal to the model, and lowers it for all other draft models.
        params = replace(sequence.params, temperature=0.0)
        self.context = SamplingContext(params, list(sequence.token_ids), sequence.num_prompt_tokens)
        """The sampling context of the token after the draft."""

    def add(self, token: int | None) -> bool:
        """Append the next token. Returns whether to continue: False after an end token, and if all tokens are banned."""
        if token is None:
            return False
        self.token_ids.append(token)
        self.context.token_ids.append(token)
        return len(self.token_ids) < self._most and token not in self.context.params.end_token_ids

    def last(self, position: int = -1) -> NewTokens:
        """Return the last draft token as the next token to compute, at its own position (-1) or the one before (-2)."""
        return NewTokens(self.sequence, len(self.context.token_ids) + position, self.token_ids[-1:], 1)


def grow(drafts: list[Draft], logits: Tensor) -> list[int]:
    """Append a token to each draft, from its row of logits [R, V]. Returns the indices of the drafts that continue."""
    if not drafts:
        return []
    finite = logits.nan_to_num(neginf=-torch.inf)  # an overflow makes a bad draft, but is not an error
    tokens = sample(finite, [draft.context for draft in drafts])
    return [i for i, (draft, token) in enumerate(zip(drafts, tokens, strict=True)) if draft.add(token)]

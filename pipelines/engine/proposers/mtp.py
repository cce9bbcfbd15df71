"""Drafts of the model's own layer for it (multi-token prediction, arXiv 2412.19437), whose keys and values come last in the cache.

The layer reads the hidden state of a token and the token behind it, so it can compute all but the last token of a sequence. Further drafts
come of its own hidden states.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.engine.batch import NewTokens, flat_batch
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.draft import Draft, grow
from pipelines.engine.request import Sequence
from pipelines.engine.runner import Runner
from pipelines.engine.scheduler import Scheduled


class Seen(NamedTuple):
    """Hidden states [P, E] of a sequence's tokens from a position on, which the layer has not computed. Drafts' follow: some are wrong."""

    start: int
    hidden: Tensor


class MtpProposer(Proposer):
    reads_hidden = True

    def __init__(self, runner: Runner, block_size: int) -> None:
        """`runner`: of the model, which predicts ahead."""
        self._runner = runner
        self._block_size = block_size
        for stored in runner.cache.layers[-1]:
            for tensor in stored.tensors:
                tensor.zero_()  # rows that others drafted for leave gaps, and blocks of theirs are shared

    def observe(self, computed: list[tuple[Scheduled, Tensor]]) -> None:
        """Take the hidden states [T, E] of sequences, and compute those of the step before, whose next tokens are known by now."""
        self._compute([(i.sequence, i.start) for i, _ in computed if self._reaches(i.sequence, i.start)])
        for item, hidden in computed:
            item.sequence.drafting = Seen(item.start, hidden.clone())

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most so many tokens that may follow each sequence: none before the model has computed all but its last token."""
        drafts = [Draft(sequence, most) for sequence, most in wanted]
        ends = {draft.sequence: len(draft.sequence.token_ids) - 1 for draft in drafts}
        growing = [draft for draft in drafts if self._reaches(draft.sequence, ends[draft.sequence])]
        hidden = self._compute([(draft.sequence, ends[draft.sequence]) for draft in growing])
        while growing and (more := grow(growing, self._runner.model.logits(hidden))):
            growing, hidden = [growing[i] for i in more], hidden[more]
            hidden = self._predict([draft.last(position=-2) for draft in growing], hidden)
        return [draft.token_ids for draft in drafts]

    @staticmethod
    def _reaches(sequence: Sequence, end: int) -> bool:
        """Return whether hidden states of the sequence are there that the layer has not computed, up to the position `end`."""
        seen: Seen | None = sequence.drafting
        return seen is not None and seen.start < end <= seen.start + len(seen.hidden)

    def _compute(self, parts: list[tuple[Sequence, int]]) -> Tensor:
        """Compute what was seen of sequences up to these positions. Returns hidden states [S, E] of the last of each."""
        new, hidden = [], []
        for sequence, end in parts:
            seen: Seen = sequence.drafting
            new.append(NewTokens(sequence, seen.start, sequence.token_ids[seen.start + 1 : end + 1], 1))
            hidden.append(seen.hidden[: end - seen.start])
            sequence.drafting = Seen(end, seen.hidden[:0])
        return self._predict(new, torch.cat(hidden)) if new else torch.empty(0)

    def _predict(self, new: list[NewTokens], hidden: Tensor) -> Tensor:
        """Return hidden states [S, E] of the last of each sequence's tokens, whose positions are those of the tokens before them."""
        batch = self._runner.on_device(flat_batch(new, self._block_size))
        return self._runner.model.predict_ahead(hidden, batch, self._runner.cache)

"""Drafts of the model's multi-token prediction layer (arXiv 2412.19437).

The layer's keys and values come last in the cache. The layer reads the hidden state of a token and the token after it,
so it can compute all but the last token of a sequence. It computes further drafts from its own hidden states.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.engine.batch import NewTokens, flat_batch
from pipelines.engine.executor import Executor
from pipelines.engine.operations import ClearAhead, Logits, PredictAhead
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.draft import Draft, grow
from pipelines.engine.request import Sequence
from pipelines.engine.scheduler import Scheduled

# Maximum tokens of a row that wait for its next draft. A CPU reads each weight only once for up to this many tokens.
MAX_WAITING = 16


class WaitingHidden(NamedTuple):
    """Hidden states [P, E] of a sequence's tokens from position `start`, which the layer has not computed yet.

    The last rows belong to drafts, some of which may have been rejected.
    """

    start: int
    hidden: Tensor


class MtpProposer(Proposer):
    reads_hidden = True

    def __init__(self, executor: Executor, block_size: int, max_batched_tokens: int) -> None:
        """`executor`: the main model's. The layer computes at most `max_batched_tokens` tokens per call."""
        self._executor = executor
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        # The layer does not compute rows of other proposers. Later rows can share the blocks of these rows, and must
        # not read uninitialised memory.
        executor.run(ClearAhead())

    def observe(self, computed: list[tuple[Scheduled, Tensor]]) -> None:
        """Keep hidden states [T, E] until the next draft. If too many wait, the layer computes the earlier ones.

        Hidden states that still wait when a row ends or is preempted are never computed. Rows that share the blocks of
        this row then get worse drafts.
        """
        waiting = [self._num_waiting(item.sequence, item.start) for item, _ in computed]
        num_tokens = sum(waiting) + sum(len(hidden) for _, hidden in computed)
        if num_tokens > min(MAX_WAITING * len(computed), self._max_batched_tokens):
            self._compute(
                [(item.sequence, item.start) for (item, _), count in zip(computed, waiting, strict=True) if count]
            )
            waiting = [0] * len(computed)
        for (item, hidden), count in zip(computed, waiting, strict=True):
            before = item.sequence.drafting.hidden[:count] if count else hidden[:0]
            item.sequence.drafting = WaitingHidden(item.start - count, torch.cat((before, hidden)))

    def propose(self, limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return draft tokens for each sequence; none before the model has computed all but its last token."""
        drafts = [Draft(sequence, most) for sequence, most in limits]
        ends = {draft.sequence: len(draft.sequence.token_ids) - 1 for draft in drafts}
        growing = [draft for draft in drafts if self._num_waiting(draft.sequence, ends[draft.sequence])]
        hidden = self._compute([(draft.sequence, ends[draft.sequence]) for draft in growing])
        while growing and (more := grow(growing, self._executor.run(Logits(hidden)))):
            growing, hidden = [growing[i] for i in more], hidden[more]
            hidden = self._predict([draft.last(position=-2) for draft in growing], hidden)
        return [draft.token_ids for draft in drafts]

    @staticmethod
    def _num_waiting(sequence: Sequence, end: int) -> int:
        """Return how many hidden states before position `end` wait for the layer: 0 if some of them are missing."""
        waiting: WaitingHidden | None = sequence.drafting
        count = 0 if waiting is None else end - waiting.start
        return count if waiting is not None and 0 < count <= len(waiting.hidden) else 0

    def _compute(self, parts: list[tuple[Sequence, int]]) -> Tensor:
        """Run the layer on the waiting hidden states of each sequence, up to the given position.

        Returns the layer's hidden states [S, E] of the last position of each sequence.
        """
        new, hidden = [], []
        for sequence, end in parts:
            waiting: WaitingHidden = sequence.drafting
            new.append(NewTokens(sequence, waiting.start, sequence.token_ids[waiting.start + 1 : end + 1], 1))
            hidden.append(waiting.hidden[: end - waiting.start])
            sequence.drafting = WaitingHidden(end, waiting.hidden[:0])
        return self._predict(new, torch.cat(hidden)) if new else torch.empty(0)

    def _predict(self, new: list[NewTokens], hidden: Tensor) -> Tensor:
        """Return hidden states [S, E] of each sequence's last token. A token has the position of its predecessor."""
        return self._executor.run(PredictAhead(hidden, flat_batch(new, self._block_size)))

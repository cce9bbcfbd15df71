"""Drafts of a smaller model with the same tokens, whose keys and values lie beside the model's own, in blocks of the same numbers.

It computes by itself what it missed: prompts, and what others drafted. What its cache holds decides how many drafts stay, and no token.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipelines.engine.batch import NewTokens, flat_batch
from pipelines.engine.executor import Executor
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.draft import Draft, grow
from pipelines.engine.request import Sequence


class Held(NamedTuple):
    """The tokens of a sequence that are in the draft model's cache."""

    num_tokens: int
    drafts: tuple[int, ...]
    """What was computed after them."""

    def num_right(self, token_ids: list[int]) -> int:
        """Return how many of the sequence's tokens are in the cache, with the drafts that became tokens."""
        num_tokens = self.num_tokens
        for draft in self.drafts:
            if num_tokens == len(token_ids) or token_ids[num_tokens] != draft:
                break
            num_tokens += 1
        return num_tokens


class ModelProposer(Proposer):
    """Drafts token by token, all sequences in one batch."""

    def __init__(self, executor: Executor, block_size: int, max_batched_tokens: int, vocab_size: int) -> None:
        """`executor`: of the draft model. Before a step it computes at most `max_batched_tokens` tokens beside the drafts.

        `vocab_size`: of the model that is drafted for. Tokens that only one of them has are padding, and are not drafted.
        """
        self.executor = executor
        self._vocab_size, self._own_vocab_size = vocab_size, executor.model.config.vocab_size
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        self._hashes: dict[int, bytes] = {}  # of each block that the draft model has filled: as the prefix cache's

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of the draft model's cache."""
        self.executor.copy_blocks(copies)
        for _, target in copies:
            self._hashes.pop(target, None)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most so many tokens that may follow each sequence: none where more of it was missed than one batch takes."""
        drafts = {sequence: Draft(sequence, most) for sequence, most in wanted}
        missed = self._missed(list(drafts))
        for part in missed:
            self._hold(part)
        growing = ready = [drafts[part.sequence] for part in missed if part.num_outputs]
        new = missed
        while new and (more := grow(growing, self._logits(new))):
            growing = [growing[i] for i in more]
            new = [draft.last() for draft in growing]
        for draft in ready:
            draft.sequence.drafting = Held(len(draft.sequence.token_ids), tuple(draft.token_ids[:-1]))
        return [draft.token_ids for draft in drafts.values()]

    def _logits(self, new: list[NewTokens]) -> Tensor:
        """Compute new tokens, and return logits [R, V] of the other model's vocabulary: -inf for what this one has not."""
        logits = self.executor.execute(flat_batch(new, self._block_size)).logits
        return pad(logits, (0, self._vocab_size - self._own_vocab_size), value=-torch.inf)

    def _missed(self, sequences: list[Sequence]) -> list[NewTokens]:
        """Return the tokens that are not in the cache, of each sequence the last one at least, as far as the budget goes.

        None of a sequence of which one is not in this model's vocabulary.
        """
        budget, parts = self._max_batched_tokens, []
        for sequence in sequences:
            start = self._num_held(sequence)
            token_ids = sequence.token_ids[start : start + budget]
            if max(token_ids, default=self._own_vocab_size) < self._own_vocab_size:
                is_whole = start + len(token_ids) == len(sequence.token_ids)
                parts.append(NewTokens(sequence, start, token_ids, int(is_whole)))
                budget -= len(token_ids)
        return parts

    def _num_held(self, sequence: Sequence) -> int:
        """Return how many tokens need not be computed; the last one's output is always wanted."""
        held: Held | None = sequence.drafting
        if held:
            num_tokens = held.num_right(sequence.token_ids)
        else:  # of a row that began alike
            blocks = list(zip(sequence.block_table, sequence.block_hashes, strict=False))
            first = sequence.prefix.num_tokens // self._block_size
            others = (i for i in range(first, len(blocks)) if self._hashes.get(blocks[i][0]) != blocks[i][1])
            end = next(others, len(blocks))
            num_tokens = end * self._block_size - sequence.prefix.num_tokens if end > first else 0
        return min(num_tokens, len(sequence.token_ids) - 1)

    def _hold(self, part: NewTokens) -> None:
        """Note what is in the cache now: of a block that is full, and that later prompts may find, its hash."""
        sequence, after = part.sequence, part.start + len(part.token_ids)
        sequence.drafting = Held(after, ())
        first, after = (sequence.prefix.num_tokens + position for position in (part.start, after))
        num_full = min(after // self._block_size, len(sequence.block_hashes))
        for i in range(first // self._block_size, len(sequence.block_table)):
            block = sequence.block_table[i]
            if i < num_full:
                self._hashes[block] = sequence.block_hashes[i]
            else:
                self._hashes.pop(block, None)

"""Drafts of a smaller model with the same tokens. Its own KV cache uses the block tables of the main model.

Its layers with windows use these block tables too: when it computes a prompt, the main model has released the prompt's
first window blocks.

It computes by itself all tokens that its cache lacks: prompts, and tokens that another proposer drafted. Its cache
content decides how many drafts are accepted, but never which tokens are generated. Recurrent layers have slots of their
own (`DraftStates`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipelines.engine.batch import NewTokens, flat_batch
from pipelines.engine.executor import Executor
from pipelines.engine.operations import CopyBlocks
from pipelines.engine.proposers import Proposer
from pipelines.engine.proposers.draft import Draft, grow
from pipelines.engine.proposers.draft_states import DraftStates
from pipelines.engine.request import Sequence


class CachedTokens(NamedTuple):
    """The tokens of a sequence that are in the draft model's cache."""

    num_tokens: int
    drafts: tuple[int, ...]
    """The draft tokens that were computed after them."""

    def num_matching(self, token_ids: list[int]) -> int:
        """Return how many of the sequence's tokens are in the cache, including accepted drafts."""
        num_tokens = self.num_tokens
        for draft in self.drafts:
            if num_tokens == len(token_ids) or token_ids[num_tokens] != draft:
                break
            num_tokens += 1
        return num_tokens


class ModelProposer(Proposer):
    """Drafts token by token, all sequences in one batch."""

    def __init__(self, executor: Executor, block_size: int, max_batched_tokens: int, vocab_size: int) -> None:
        """`executor`: the draft model's. `vocab_size`: the main model's.

        It computes at most `max_batched_tokens` tokens per step, not counting the drafts. Tokens that only one of the
        two vocabularies has are padding, and are never drafted.
        """
        self.executor = executor
        self._vocab_size, self._draft_vocab_size = vocab_size, executor.model.config.vocab_size
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        self._hashes: dict[int, bytes] = {}  # prefix cache hashes of the blocks that the draft model has filled
        self._is_recurrent = executor.model.config.capabilities.is_recurrent
        self._states = DraftStates(executor.cache.num_slots if self._is_recurrent else 0)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            self.executor.run(CopyBlocks(copies, []))
        for _, target in copies:
            self._hashes.pop(target, None)

    def propose(self, limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return draft tokens for each sequence; none if its missing tokens exceed one batch, or no state is free."""
        drafts = {sequence: Draft(sequence, most) for sequence, most in limits}
        missed = self._uncached_tokens(list(drafts))
        for part in missed:
            self._record_cached(part)
        growing = ready = [drafts[part.sequence] for part in missed if part.num_outputs]
        new = missed
        while new and (more := grow(growing, self._logits(new))):
            growing = [growing[i] for i in more]
            new = [self._last(draft) for draft in growing]
        for draft in ready:
            computed = () if self._is_recurrent else tuple(draft.token_ids[:-1])
            draft.sequence.drafting = CachedTokens(len(draft.sequence.token_ids), computed)
        return [draft.token_ids for draft in drafts.values()]

    def learn(self, sequence: Sequence) -> None:
        self._states.drop(sequence)

    def _last(self, draft: Draft) -> NewTokens:
        last, number = draft.last(), len(draft.token_ids) - 1
        return last._replace(state_slots=self._states.of_draft(draft.sequence, number)) if self._is_recurrent else last

    def _logits(self, new: list[NewTokens]) -> Tensor:
        """Compute new tokens, and return logits [R, V] over the main model's vocabulary.

        Tokens that the draft model lacks have -inf.
        """
        logits = self.executor.execute(flat_batch(new, self._block_size, is_draft=True)).logits
        return pad(logits, (0, self._vocab_size - self._draft_vocab_size), value=-torch.inf)

    def _uncached_tokens(self, sequences: list[Sequence]) -> list[NewTokens]:
        """Return the tokens of each sequence that are not in the cache, at least the last token, within the budget.

        Skips a sequence with a token that is not in the draft model's vocabulary.
        """
        budget, parts = self._max_batched_tokens, list[NewTokens]()
        for sequence in sequences:
            if self._is_recurrent and len(parts) == self._states.num_pairs:
                break
            start = self._num_cached(sequence)
            token_ids = sequence.token_ids[start : start + budget]
            if max(token_ids, default=self._draft_vocab_size) < self._draft_vocab_size:
                is_whole = start + len(token_ids) == len(sequence.token_ids)
                parts.append(self._with_state(NewTokens(sequence, start, token_ids, int(is_whole))))
                budget -= len(token_ids)
        return parts

    def _with_state(self, part: NewTokens) -> NewTokens:
        if not self._is_recurrent:
            return part
        self._states.use(part.sequence)
        return part._replace(state_slots=self._states.of_tokens(part.sequence, part.start))

    def _num_cached(self, sequence: Sequence) -> int:
        """Return how many tokens are already computed. It never includes the last token, whose output is needed."""
        cached: CachedTokens | None = sequence.drafting
        if self._is_recurrent:  # blocks of an earlier row have no state; nor has a fork
            num_tokens = cached.num_tokens if cached and sequence in self._states else 0
            return num_tokens if num_tokens < len(sequence.token_ids) else 0
        if cached:
            num_tokens = cached.num_matching(sequence.token_ids)
        else:  # a new row; its blocks may be shared with an earlier row
            blocks = list(zip(sequence.block_table, sequence.block_hashes, strict=False))
            first = sequence.prefix.num_tokens // self._block_size
            changed = (i for i in range(first, len(blocks)) if self._hashes.get(blocks[i][0]) != blocks[i][1])
            end = next(changed, len(blocks))
            num_tokens = end * self._block_size - sequence.prefix.num_tokens if end > first else 0
        return min(num_tokens, len(sequence.token_ids) - 1)

    def _record_cached(self, part: NewTokens) -> None:
        """Record the cache content, with the hashes of full blocks for sequences that share them later."""
        sequence, after = part.sequence, part.start + len(part.token_ids)
        sequence.drafting = CachedTokens(after, ())
        first, after = (sequence.prefix.num_tokens + position for position in (part.start, after))
        num_full = min(after // self._block_size, len(sequence.block_hashes))
        for i in range(first // self._block_size, len(sequence.block_table)):
            block = sequence.block_table[i]
            if i < num_full:
                self._hashes[block] = sequence.block_hashes[i]
            else:
                self._hashes.pop(block, None)

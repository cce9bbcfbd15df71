"""The recurrent states of a draft model. Imports no torch.

A sequence has a pair of slots: the state after its tokens, and the state after drafts that follow them. Drafts that
were accepted are computed again, because the first state does not include them.
"""

from pipelines.engine.request import Sequence
from pipelines.engine.state_manager import StateSlots


class DraftStates:
    """Pairs of slots. If none is free, the sequence that drafted longest ago loses its pair."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: 0 for a draft model without recurrent layers."""
        self._free = list(range(num_slots // 2))
        self._pairs: dict[Sequence, int] = {}  # the last used one is last

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._pairs

    def use(self, sequence: Sequence) -> None:
        """Give the sequence a pair, or keep its pair longest."""
        pair = self._pairs.pop(sequence, None)
        if pair is None:
            pair = self._free.pop() if self._free else self._pairs.pop(next(iter(self._pairs)))
        self._pairs[sequence] = pair

    def drop(self, sequence: Sequence) -> None:
        if (pair := self._pairs.pop(sequence, None)) is not None:
            self._free.append(pair)

    @property
    def num_pairs(self) -> int:
        return len(self._free) + len(self._pairs)

    def of_tokens(self, sequence: Sequence, start: int) -> StateSlots:
        """Return the slots of a step that computes the sequence's tokens from position `start` on."""
        slot = 2 * self._pairs[sequence]
        return StateSlots(slot if start else -1, slot)

    def of_draft(self, sequence: Sequence, number: int) -> StateSlots:
        """Return the slots of a step that computes the draft token `number`, counted from 0."""
        slot = 2 * self._pairs[sequence]
        return StateSlots(slot + (number > 0), slot + 1)

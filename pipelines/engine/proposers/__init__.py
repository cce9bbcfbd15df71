"""Who drafts: guesses of what follows a sequence. Nothing they say changes a token."""

from typing import Protocol

from pipelines.engine.request import Sequence


class Proposer(Protocol):
    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most so many tokens that may follow each sequence, whose block table has room for them."""

    def learn(self, sequence: Sequence) -> None:
        """Take a sequence that has finished, for later rows."""

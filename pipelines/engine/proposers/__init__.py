"""Who drafts: guesses of what follows a sequence. Nothing they say changes a token."""

from typing import ClassVar, Protocol

from torch import Tensor

from pipelines.engine.request import Sequence
from pipelines.engine.scheduler import Scheduled


class Proposer(Protocol):
    reads_hidden: ClassVar[bool] = False
    """Whether `observe` is called."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most so many tokens that may follow each sequence, whose block table has room for them."""

    def learn(self, sequence: Sequence) -> None:
        """Take a sequence that has finished, for later rows."""
        return

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy what the proposer keeps in blocks, from and to, as the model's own is copied."""
        return

    def observe(self, computed: list[tuple[Scheduled, Tensor]]) -> None:
        """Take the hidden states [T, E] of what a step computes of each sequence, drafts among it. The next step overwrites them."""
        return

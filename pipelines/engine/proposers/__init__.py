"""Proposers of draft tokens for speculative decoding. Drafts do not change the generated tokens."""

from typing import ClassVar, Protocol

from torch import Tensor

from pipelines.engine.request import Sequence
from pipelines.engine.scheduler import Scheduled


class Proposer(Protocol):
    reads_hidden: ClassVar[bool] = False
    """Whether the engine calls `observe`."""

    def propose(self, limits: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return draft tokens for each sequence, at most the given number.

        The sequence's block table has room for them.
        """

    def learn(self, sequence: Sequence) -> None:
        """Learn from a finished sequence, for later rows."""
        return

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy the proposer's own data in blocks, as the model's cache is copied. `copies`: source and target."""
        return

    def observe(self, computed: list[tuple[Scheduled, Tensor]]) -> None:
        """Take the hidden states [T, E] of each sequence's tokens in a step, drafts included.

        The next step overwrites them.
        """
        return

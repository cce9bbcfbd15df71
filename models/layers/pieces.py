"""What a rank of a divided model does with the pieces that it has of a tensor's channels.

T tokens, E channels, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.collectives import Group
from models.layers.constant import Constant


@dataclass(frozen=True)
class Pieces:
    """Channels of which every rank has some, beside each other in the order of the ranks."""

    group: Group
    widths: tuple[int, ...]

    def joined(self, x: Tensor) -> Tensor:
        """Return the whole [T, sum(widths)] of this rank's x [T, widths[rank]]."""
        return self.group.gather(x, self.widths)

    def joined_by_first(self, x: Tensor) -> Tensor:
        """Return the whole to rank 0; the others keep what they have."""
        whole = self.group.gather_first(x, self.widths)
        return x if whole is None else whole


@dataclass(frozen=True)
class RowPieces:
    """The inputs of a linear layer that come in pieces, and its outputs, which must be whole again."""

    inputs: Pieces
    outputs: Pieces


class OwnedWords:
    """A vocabulary of which every rank has some words, one range behind the other."""

    def __init__(self, group: Group, words: tuple[range, ...]) -> None:
        """`words` are those of each rank."""
        self._group, self._words = group, words[group.rank]
        starts = [each.start for each in words[1:]]
        self._borders = Constant(torch.tensor(starts, dtype=torch.int64, device="cpu"))

    def embedded(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Return the vectors [T, E] of tokens, int64 [T], of which `weight` has this rank's."""
        owners = torch.bucketize(token_ids, self._borders.on(token_ids.device), right=True)  # [T]
        own = (token_ids - self._words.start).clamp(0, len(self._words) - 1)  # of another rank's words any row
        return self._group.owned_rows(functional.embedding(own, weight), owners)

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
class RowParallelGather:
    """The inputs of a linear layer that come in pieces, and its outputs, which must be whole again: both are joined."""

    inputs: Pieces
    outputs: Pieces
    adds_bias = True

    def given(self, x: Tensor) -> Tensor:
        """Return what the layer multiplies of this rank's x [T, *]."""
        return self.inputs.joined(x)

    def observed(self, x: Tensor) -> Tensor:
        """Return the layer's whole inputs to rank 0; the others keep what they have."""
        return self.inputs.joined_by_first(x)

    def whole(self, y: Tensor) -> Tensor:
        """Return the whole outputs [T, E] of what this rank's product gives."""
        return self.outputs.joined(y)


@dataclass(frozen=True)
class RowParallelReduce:
    """The pieces of a linear layer whose weight is cut along its inputs. Every rank multiplies its own, and the products are added."""

    group: Group

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is in this rank's product. It is added once."""
        return self.group.rank == 0

    def given(self, x: Tensor) -> Tensor:
        return x

    def whole(self, y: Tensor) -> Tensor:
        """Return the sum of all ranks' y [T, E], in float32 and in the order of the ranks, so that all have the same bits."""
        every = self.group.gather(y, (y.shape[1],) * self.group.size)
        first, *others = every.split(y.shape[1], dim=1)
        total: Tensor = first.to(torch.promote_types(y.dtype, torch.float32))
        for other in others:
            total = total + other
        return total.to(y.dtype)


class ExpertParallel:
    """A layer's experts of which every rank has some, one range after the other."""

    def __init__(self, group: Group, experts: tuple[range, ...]) -> None:
        """`experts` are those of each rank."""
        self._group, self.own = group, experts[group.rank]
        self._first = Constant(torch.tensor([each.start for each in experts[1:]], dtype=torch.int64, device="cpu"))

    def joined(self, parts: Tensor, starts: Tensor) -> Tensor:
        """Return all rows [R, E] of parts [R, E], in which a rank has those of its own experts; expert i's begin at starts[i]."""
        borders: Tensor = starts[self._first.on(starts.device)]
        owners = torch.bucketize(torch.arange(len(parts), device=starts.device), borders, right=True)
        return self._group.owned_rows(parts, owners)


class VocabParallel:
    """A vocabulary of which every rank has some words, one range after the other."""

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

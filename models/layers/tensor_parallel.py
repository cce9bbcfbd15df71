"""The communication of tensor-parallel layers.

T tokens, E channels, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.collectives import Group
from models.layers.constant import Constant


@dataclass(frozen=True)
class ShardedChannels:
    """A tensor whose channels are sharded over the ranks, in rank order. `widths`: the channels of each rank."""

    group: Group
    widths: tuple[int, ...]

    def gather(self, x: Tensor) -> Tensor:
        """Return the whole tensor [T, sum(widths)] from this rank's x [T, widths[rank]]."""
        return self.group.gather(x, self.widths)

    def gather_first(self, x: Tensor) -> Tensor:
        """Return the whole tensor on rank 0, and x on all other ranks."""
        gathered = self.group.gather_first(x, self.widths)
        return x if gathered is None else gathered


@dataclass(frozen=True)
class RowParallelGather:
    """A row-parallel layer whose weight is sharded along its outputs. It gathers its inputs, and then its outputs."""

    inputs: ShardedChannels | None
    """None: each rank has the whole inputs."""
    outputs: ShardedChannels
    adds_bias = True

    def gather_inputs(self, x: Tensor) -> Tensor:
        """Return the whole inputs from this rank's x [T, *]."""
        return x if self.inputs is None else self.inputs.gather(x)

    def observe_inputs(self, x: Tensor) -> Tensor:
        """Return the whole inputs on rank 0, and x on all other ranks."""
        return x if self.inputs is None else self.inputs.gather_first(x)

    def combine_outputs(self, y: Tensor) -> Tensor:
        """Return the whole outputs [T, E] from this rank's outputs."""
        return self.outputs.gather(y)


@dataclass(frozen=True)
class RowParallelReduce:
    """A row-parallel layer whose weight is sharded along its inputs. The ranks' products are added."""

    group: Group

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the bias. Only rank 0 does."""
        return self.group.rank == 0

    def gather_inputs(self, x: Tensor) -> Tensor:
        return x

    def combine_outputs(self, y: Tensor) -> Tensor:
        """Return the sum of all ranks' y [T, E].

        The sum is in float32 and in rank order, so that all ranks get the same bits.
        """
        all_outputs = self.group.gather(y, (y.shape[1],) * self.group.size)
        first, *others = all_outputs.split(y.shape[1], dim=1)
        total: Tensor = first.to(torch.promote_types(y.dtype, torch.float32))
        for other in others:
            total = total + other
        return total.to(y.dtype)


class ExpertParallel:
    """The experts of a layer, of which each rank has one contiguous range."""

    def __init__(self, group: Group, experts: tuple[range, ...]) -> None:
        """`experts`: the range of each rank."""
        self._group, self.local_experts = group, experts[group.rank]
        self._first = Constant(
            torch.tensor([indices.start for indices in experts[1:]], dtype=torch.int64, device="cpu")
        )

    def collect_rows(self, parts: Tensor, starts: Tensor) -> Tensor:
        """Return all rows [R, E]. In `parts` [R, E] each rank has the rows of its own experts.

        Rows of expert i begin at starts[i].
        """
        borders: Tensor = starts[self._first.on(starts.device)]
        owners = torch.bucketize(torch.arange(len(parts), device=starts.device), borders, right=True)
        return self._group.owned_rows(parts, owners)


class VocabParallel:
    """A vocabulary of which each rank has one contiguous range."""

    def __init__(self, group: Group, words: tuple[range, ...]) -> None:
        """`words`: the range of each rank."""
        self._group, self._words = group, words[group.rank]
        starts = [indices.start for indices in words[1:]]
        self._borders = Constant(torch.tensor(starts, dtype=torch.int64, device="cpu"))

    def embed(self, token_ids: Tensor, lookup: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the vectors [T, E] of tokens, int64 [T]. `lookup` returns vectors of this rank's tokens."""
        owners = torch.bucketize(token_ids, self._borders.on(token_ids.device), right=True)  # [T]
        local_ids = (token_ids - self._words.start).clamp(0, len(self._words) - 1)  # any row for tokens of other ranks
        return self._group.owned_rows(lookup(local_ids), owners)

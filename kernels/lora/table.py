"""The adapters of one linear layer. N slots, R the largest rank, I inputs, O outputs."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdapterTable:
    """Low-rank factors by slot. They are replaced in place, so that recorded steps read the new factors."""

    a: Tensor
    """[N, R, I]; the first `ranks[slot]` rows of a slot are used."""
    b: Tensor
    """B transposed, [N, R, O]; the first `ranks[slot]` rows of a slot are used."""
    ranks: Tensor
    """int64 [N]; 0: the adapter does not change this layer."""
    scales: Tensor
    """float32 [N]."""

    @staticmethod
    def empty(
        num_slots: int, max_rank: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
    ) -> "AdapterTable":
        """Return a table without adapters."""
        return AdapterTable(
            torch.zeros(num_slots, max_rank, inputs, dtype=dtype, device=device),
            torch.zeros(num_slots, max_rank, outputs, dtype=dtype, device=device),
            torch.zeros(num_slots, dtype=torch.int64, device=device),
            torch.zeros(num_slots, device=device),
        )

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a.shape[1]

    @cached_property
    def is_whole(self) -> bool:
        """Whether shapes and dtypes of the tensors match, and all are contiguous on one device."""
        parts, size = (self.a, self.b, self.ranks, self.scales), self.a.shape[:1]
        are_alike = (
            self.a.ndim == 3 and self.b.shape[:2] == self.a.shape[:2] and self.ranks.shape == self.scales.shape == size
        )
        dtypes = (self.b.dtype, self.ranks.dtype, self.scales.dtype) == (self.a.dtype, torch.int64, torch.float32)
        on_one_device = len({part.device for part in parts}) == 1
        return (
            are_alike and dtypes and self.b.ndim == 3 and on_one_device and all(part.is_contiguous() for part in parts)
        )

    def put(self, slot: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Write the factors A [r, I] and B [O, r] into a slot; r is at most R."""
        rank = len(a)
        self.a[slot, :rank].copy_(a)
        self.b[slot, :rank].copy_(b.T)
        self.ranks[slot] = rank
        self.scales[slot] = scale

    def clear(self, slot: int) -> None:
        self.ranks[slot] = 0

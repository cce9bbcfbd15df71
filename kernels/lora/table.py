"""The adapters of one linear layer. N slots, R the largest rank, I inputs, O outputs."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdapterTable:
    """Low-rank factors by slot. They are replaced in place, so that recorded steps read the new ones."""

    a: Tensor
    """[N, R, I], of which the first `ranks[slot]` rows count."""
    b: Tensor
    """[N, R, O], B transposed, likewise."""
    ranks: Tensor
    """int64 [N]; 0: the adapter does not change this layer."""
    scales: Tensor
    """float32 [N]"""

    @staticmethod
    def empty(
        num_slots: int, max_rank: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
    ) -> "AdapterTable":
        """Return a table whose slots change nothing."""
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
        """Whether the parts have the shapes and dtypes of one table, and are contiguous on one device."""
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
        """Fill a slot with factors A [r, I] and B [O, r], r no more than R."""
        rank = len(a)
        self.a[slot, :rank].copy_(a)
        self.b[slot, :rank].copy_(b.T)
        self.ranks[slot] = rank
        self.scales[slot] = scale

    def clear(self, slot: int) -> None:
        """Let a slot change nothing."""
        self.ranks[slot] = 0

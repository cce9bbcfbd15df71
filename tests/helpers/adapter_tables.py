"""Adapter tables with random factors."""

import torch
from torch import Tensor

from kernels.lora import AdapterTable

RANKS = [4, 0, 17, 1]  # of slot 0, 1, ...


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_table(inputs: int, outputs: int, dtype: torch.dtype, ranks: list[int] = RANKS, room: int = 20) -> AdapterTable:
    """Return a table with adapters of these ranks. All values that must not be read are NaN."""
    table = AdapterTable.empty(len(ranks), room, inputs, outputs, dtype, torch.device("cpu"))
    table.a.fill_(torch.nan), table.b.fill_(torch.nan)
    for slot, rank in enumerate(ranks):
        table.put(slot, noise(rank, inputs, seed=rank), noise(outputs, rank, seed=rank + 100), 0.5 + slot)
    return table

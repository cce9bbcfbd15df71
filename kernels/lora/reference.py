"""T rows, I inputs and O outputs of a linear layer, N slots for adapters with a rank of at most R."""

import torch
from torch import Tensor

from kernels.lora.table import AdapterTable


def lora_add(y: Tensor, x: Tensor, table: AdapterTable, slots: Tensor) -> None:
    """Add scale * B (A x) of each row's adapter to y [T, O], x [T, I], in place (arXiv 2106.09685).

    slots int64 [T]: the index of the row's adapter in the table, or -1 for none. A x and the sum are float32, rounded
    once to y's dtype. Only the first `ranks[slot]` rows of a slot's factors are used.
    """
    rows = x.float()
    for slot in range(table.num_slots):
        is_used = torch.arange(table.max_rank, device=x.device) < table.ranks[slot]
        a, b = (part[slot].float().masked_fill(~is_used[:, None], 0) for part in (table.a, table.b))
        added = table.scales[slot] * ((rows @ a.T) @ b)
        is_own = (slots == slot) & (table.ranks[slot] > 0)
        y.copy_(torch.where(is_own[:, None], (y.float() + added).to(y.dtype), y))

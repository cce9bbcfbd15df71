"""Adds low-rank adapters (LoRA) to the outputs of a linear layer. Each row has its own adapter or none.

T rows, I inputs, O outputs.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.lora import reference
from kernels.lora.table import AdapterTable
from kernels.operator import Parts, UnsupportedArguments, operator

__all__ = ["AdapterTable", "lora_add"]


@operator(
    reference.lora_add,
    fake=lambda y, x, table, slots: None,
    has_triton=True,
    parts={"table": Parts.of(AdapterTable)},
    mutates_args=("y",),
)
def lora_add(cpp: Library, y: Tensor, x: Tensor, table: AdapterTable, slots: Tensor) -> None:
    """Add each row's adapter to y [T, O] for x [T, I], as `reference.lora_add` does. Rows need not be contiguous.

    The bits of a row depend only on the row and its adapter, not on other rows, their ranks, or the slot.
    """
    dtype = DTYPES.get(y.dtype)
    if dtype is None or not _fit(y, x, table, slots) or y.stride(1) != 1:
        raise UnsupportedArguments
    x, slots = x if x.stride(1) == 1 else x.contiguous(), slots.contiguous()
    (num_rows, num_inputs), num_outputs = x.shape, y.shape[1]
    hidden = torch.empty(num_rows, table.max_rank)
    cpp.lora_add(
        y.data_ptr(),
        y.stride(0),
        x.data_ptr(),
        x.stride(0),
        dtype,
        table.a.data_ptr(),
        table.b.data_ptr(),
        table.ranks.data_ptr(),
        table.scales.data_ptr(),
        slots.data_ptr(),
        hidden.data_ptr(),
        num_rows,
        num_inputs,
        num_outputs,
        table.num_slots,
        table.max_rank,
    )


def _fit(y: Tensor, x: Tensor, table: AdapterTable, slots: Tensor) -> bool:
    if not table.is_whole or slots.ndim != 1 or slots.dtype != torch.int64:
        return False
    rows, (inputs, outputs) = len(slots), (table.a.shape[2], table.b.shape[2])
    are_alike = y.dtype == x.dtype == table.a.dtype and y.is_cpu and x.is_cpu and table.a.is_cpu and slots.is_cpu
    return are_alike and (y.shape, x.shape) == ((rows, outputs), (rows, inputs))

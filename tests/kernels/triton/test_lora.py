"""Adapters of many ranks in Triton compared with the reference; all values that a row's own adapter does not have are
NaN."""

import torch

from kernels.lora import reference, triton
from kernels.lora.table import AdapterTable
from tests.helpers.adapter_tables import make_table
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, assert_near, noise

SLOTS = {
    "one row": [2],
    "one adapter": [0] * 18,
    "none": [-1, -1],
    "mixed": [3, -1, 2, 0, 1, *[2] * 20, -1, *[0] * 17, -1],
}


def on_device(table: AdapterTable) -> AdapterTable:
    return AdapterTable(*(part.to(DEVICE) for part in (table.a, table.b, table.ranks, table.scales)))


def check(dtype: torch.dtype, slots: list[int], inputs: int, outputs: int) -> None:
    table, row_slots = make_table(inputs, outputs, dtype), torch.tensor(slots)
    y, x = noise(len(slots), outputs + 9, dtype=dtype, seed=1), noise(len(slots), inputs, dtype=dtype, seed=2)
    expected, result = y[:, 4:-5].clone(), y.to(DEVICE)
    reference.lora_add(expected, x, table, row_slots)
    triton.lora_add(result[:, 4:-5], x.to(DEVICE), on_device(table), row_slots.to(DEVICE))
    assert_near(result[:, 4:-5], expected)
    untouched = [row for row, slot in enumerate(slots) if slot in (-1, 1)]
    assert torch.equal(result[untouched].cpu(), y[untouched])
    assert torch.equal(result[:, :4].cpu(), y[:, :4])
    assert torch.equal(result[:, -5:].cpu(), y[:, -5:])


@each("slots", SLOTS.values())
def test_as_the_reference(slots: list[int]) -> None:
    check(torch.bfloat16, slots, 150, 70)


@each("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(dtype, SLOTS["mixed"], 40, 130)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    """Nor do they depend on the table's maximum rank."""
    slots = [2, 0, -1, *[2] * 17]
    y, x = noise(len(slots), 70, seed=1).to(DEVICE), noise(len(slots), 150, seed=2).to(DEVICE)
    together = y.clone()
    triton.lora_add(together, x, on_device(make_table(150, 70, torch.float32)), torch.tensor(slots, device=DEVICE))
    wider = make_table(150, 70, torch.float32, [17, 4], room=50)
    wider.scales.copy_(torch.tensor([2.5, 0.5]))
    for row, slot in ((0, 0), (1, 1), (19, 0)):
        alone = y[row : row + 1].clone()
        triton.lora_add(alone, x[row : row + 1], on_device(wider), torch.tensor([slot], device=DEVICE))
        assert torch.equal(alone[0], together[row])


def test_no_rows() -> None:
    memory = noise(3, 8).to(DEVICE)
    before = memory.clone()
    triton.lora_add(
        memory[:0], memory[:0], on_device(make_table(8, 8, torch.float32)), torch.zeros(0, dtype=torch.int64)
    )
    assert torch.equal(memory, before)

"""lora_add compared with the formula in float64; a row's bits depend only on that row.

T rows, I inputs, O outputs.
"""

import torch
from torch import Tensor

from kernels.lora import AdapterTable, lora_add
from kernels.threads import set_threads
from tests.helpers.adapter_tables import make_table, noise
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

# float32 sums of some 300 terms; one rounding of the result to 8 or 11 bits.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def added(y: Tensor, x: Tensor, table: AdapterTable, slots: list[int]) -> Tensor:
    """Return y after the operator."""
    result = y.clone()
    lora_add(result, x, table, torch.tensor(slots))
    return result


def expected(y: Tensor, x: Tensor, table: AdapterTable, slots: list[int]) -> Tensor:
    """Return the formula's result in float64."""
    rows = []
    for row, slot in enumerate(slots):
        rank = int(table.ranks[slot]) if slot >= 0 else 0
        a, b = table.a[slot, :rank].double(), table.b[slot, :rank].double()
        rows.append(y[row].double() + table.scales[slot].double() * (x[row].double() @ a.T) @ b)
    return torch.stack(rows)


def assert_near(result: Tensor, wanted: Tensor) -> None:
    """The tolerance is relative to the largest number, because other numbers may have the rounding errors of equally
    large terms."""
    assert (result.double() - wanted).abs().max() <= TOLERANCES[result.dtype] * wanted.abs().max().clamp(min=1)


@any_way
@each("dtype", TOLERANCES)
@each("inputs, outputs", [(1, 1), (33, 700), (300, 47)])
@each("slots", [[2], [0, 0, 0, 0, 0, -1], [3, -1, 2, 0, 1, 2, 2, 2, 2, 0, 0, 1, -1]])
@poisoned()
def test_equals_formula(dtype: torch.dtype, inputs: int, outputs: int, slots: list[int]) -> None:
    y, x = noise(len(slots), outputs, seed=1).to(dtype), noise(len(slots), inputs, seed=2).to(dtype)
    table = make_table(inputs, outputs, dtype)
    wanted = expected(y, x, table, slots)
    result = added(y, x, table, slots)
    assert result.dtype == dtype
    assert_near(result, wanted)
    for row, slot in enumerate(slots):
        if slot in (-1, 1):
            assert torch.equal(result[row], y[row])


@any_way
def test_rows_may_lie_apart() -> None:
    table, slots = make_table(33, 70, torch.float32), [0, 2, -1]
    y, x = noise(3, 99, seed=1), noise(3, 50, seed=2)
    batch_result = y.clone()
    lora_add(batch_result[:, 10:80], x[:, 5:38], table, torch.tensor(slots))
    assert_near(batch_result[:, 10:80], expected(y[:, 10:80], x[:, 5:38], table, slots))
    assert torch.equal(batch_result[:, :10], y[:, :10])
    assert torch.equal(batch_result[:, 80:], y[:, 80:])
    columns = x[:, :33].T.contiguous().T
    assert_near(added(y[:, :70], columns, table, slots), expected(y[:, :70], columns, table, slots))


@compiled
@each("dtype", TOLERANCES)
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    """Alone and with other rows, in any slot of a table with any maximum rank, with any number of threads."""
    slots = [2, 0, 0, 0, 0, 2, -1, 3, 2, 2, 2, 2, 2, 2, 2, 2, 0]
    y, x = noise(len(slots), 530, seed=1).to(dtype), noise(len(slots), 333, seed=2).to(dtype)
    set_threads(1)
    together = added(y, x, make_table(333, 530, dtype), slots)
    set_threads(3)
    other = make_table(333, 530, dtype, [1, 17, 0, 64, 4], room=64)
    for row, slot in enumerate(slots):
        there = {-1: -1, 0: 4, 2: 1, 3: 0}[slot]
        if slot >= 0:
            other.scales[there] = 0.5 + slot
        alone = added(y[row : row + 1], x[row : row + 1], other, [there])
        assert torch.equal(alone[0], together[row]), row


@any_way
def test_a_slot_is_filled_again() -> None:
    """A smaller rank overwrites all of the previous adapter."""
    y, x, table = noise(1, 40, seed=1), noise(1, 24, seed=2), make_table(24, 40, torch.float32)
    table.put(2, noise(3, 24, seed=8), noise(40, 3, seed=9), 2.0)
    assert_near(added(y, x, table, [2]), expected(y, x, table, [2]))
    table.clear(2)
    assert torch.equal(added(y, x, table, [2]), y)


@compiled
def test_slots_and_ranks_that_no_table_has() -> None:
    """A row with such a slot is unchanged. A larger rank counts only up to the table's rank."""
    set_threads(2)
    slots, y, x = [2, 4096, 0, -4096], noise(4, 40, seed=1), noise(4, 24, seed=2)
    table, full = (make_table(24, 40, torch.float32, [4, 0, 17, 1], room=17) for _ in range(2))
    table.ranks[2] = 4096
    result = added(y, x, table, slots)
    assert torch.equal(result[[0, 2]], added(y, x, full, slots)[[0, 2]])
    assert torch.equal(result[[1, 3]], y[[1, 3]])

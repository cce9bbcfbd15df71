"""lora_add against the formula in float64, and a row's bits, which are its own.

T rows, I inputs, O outputs.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.lora import AdapterTable, lora_add

RANKS = [4, 0, 17, 1]  # of slot 0, 1, ...
# float32 sums of some 300 terms; one rounding of the result to 8 or 11 bits.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_table(inputs: int, outputs: int, dtype: torch.dtype, ranks: list[int] = RANKS, room: int = 20) -> AdapterTable:
    """Factors of these ranks, and NaN in all that must not be read."""
    table = AdapterTable.empty(len(ranks), room, inputs, outputs, dtype, torch.device("cpu"))
    table.a.fill_(torch.nan), table.b.fill_(torch.nan)
    for slot, rank in enumerate(ranks):
        table.put(slot, noise(rank, inputs, seed=rank), noise(outputs, rank, seed=rank + 100), 0.5 + slot)
    return table


def added(y: Tensor, x: Tensor, table: AdapterTable, slots: list[int]) -> Tensor:
    """Return y as it is after the operator."""
    result = y.clone()
    lora_add(result, x, table, torch.tensor(slots))
    return result


def expected(y: Tensor, x: Tensor, table: AdapterTable, slots: list[int]) -> Tensor:
    """Return the formula, float64."""
    rows = []
    for row, slot in enumerate(slots):
        rank = int(table.ranks[slot]) if slot >= 0 else 0
        a, b = table.a[slot, :rank].double(), table.b[slot, :rank].double()
        rows.append(y[row].double() + table.scales[slot].double() * (x[row].double() @ a.T) @ b)
    return torch.stack(rows)


def assert_near(result: Tensor, wanted: Tensor) -> None:
    """The tolerance is relative to the largest number, whose terms' rounding errors the others may have, too."""
    assert (result.double() - wanted).abs().max() <= TOLERANCES[result.dtype] * wanted.abs().max().clamp(min=1)


@pytest.mark.usefixtures("any_way", "poisoned")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 700), (300, 47)])
@pytest.mark.parametrize("slots", [[2], [0, 0, 0, 0, 0, -1], [3, -1, 2, 0, 1, 2, 2, 2, 2, 0, 0, 1, -1]], ids=len)
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


@pytest.mark.usefixtures("any_way")
def test_rows_may_lie_apart() -> None:
    table, slots = make_table(33, 70, torch.float32), [0, 2, -1]
    y, x = noise(3, 99, seed=1), noise(3, 50, seed=2)
    whole = y.clone()
    lora_add(whole[:, 10:80], x[:, 5:38], table, torch.tensor(slots))
    assert_near(whole[:, 10:80], expected(y[:, 10:80], x[:, 5:38], table, slots))
    assert torch.equal(whole[:, :10], y[:, :10])
    assert torch.equal(whole[:, 80:], y[:, 80:])
    columns = x[:, :33].T.contiguous().T
    assert_near(added(y[:, :70], columns, table, slots), expected(y[:, :70], columns, table, slots))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_rows_bits_are_its_own(compiled: Callable[[int], None], dtype: torch.dtype) -> None:
    """Alone and among others, in any slot of a table with room for any rank, on any number of threads."""
    slots = [2, 0, 0, 0, 0, 2, -1, 3, 2, 2, 2, 2, 2, 2, 2, 2, 0]
    y, x = noise(len(slots), 530, seed=1).to(dtype), noise(len(slots), 333, seed=2).to(dtype)
    compiled(1)
    together = added(y, x, make_table(333, 530, dtype), slots)
    compiled(3)
    other = make_table(333, 530, dtype, [1, 17, 0, 64, 4], room=64)
    for row, slot in enumerate(slots):
        there = {-1: -1, 0: 4, 2: 1, 3: 0}[slot]
        if slot >= 0:
            other.scales[there] = 0.5 + slot
        alone = added(y[row : row + 1], x[row : row + 1], other, [there])
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.usefixtures("any_way")
def test_a_slot_is_filled_again() -> None:
    """By a smaller rank: nothing of the last one is left."""
    y, x, table = noise(1, 40, seed=1), noise(1, 24, seed=2), make_table(24, 40, torch.float32)
    table.put(2, noise(3, 24, seed=8), noise(40, 3, seed=9), 2.0)
    assert_near(added(y, x, table, [2]), expected(y, x, table, [2]))
    table.clear(2)
    assert torch.equal(added(y, x, table, [2]), y)


def test_slots_and_ranks_that_no_table_has(compiled: Callable[[int], None]) -> None:
    """A row of such a slot stays as it is; a rank counts up to the table's own."""
    compiled(2)
    slots, y, x = [2, 4096, 0, -4096], noise(4, 40, seed=1), noise(4, 24, seed=2)
    table, full = (make_table(24, 40, torch.float32, [4, 0, 17, 1], room=17) for _ in range(2))
    table.ranks[2] = 4096
    result = added(y, x, table, slots)
    assert torch.equal(result[[0, 2]], added(y, x, full, slots)[[0, 2]])
    assert torch.equal(result[[1, 3]], y[[1, 3]])

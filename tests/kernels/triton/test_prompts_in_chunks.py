"""The chunk form of prompts compared with the formulas in float64, and with itself in other cuts."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.gated_delta.triton import gated_delta
from kernels.ssd.triton import ssd
from kernels.state_panels import state_shape
from kernels.state_panels.triton import CHUNK
from tests.helpers.recurrences import (
    SEQUENCES,
    STARTS,
    Recurrence,
    assert_near_float64,
    check_cuts,
    gated_delta_in_float64,
    noise,
    ssd_in_float64,
)
from tests.helpers.triton_cases import DEVICE

T, LAST = int(STARTS[-1]), SEQUENCES[-1]
ENDS = [
    CHUNK,
    CHUNK,
    2 * CHUNK,
    4 * CHUNK + 1,
]  # pieces of one chunk, of none, of two chunks and a token, and of a rest
# rows and columns of a state, heads, heads of a group, dtype, and whether cuts are random
SIZES = [
    pytest.param(24, 5, 1, 1, torch.float32, False, id="small"),
    pytest.param(64, 32, 2, 2, torch.bfloat16, False, marks=pytest.mark.long),
    pytest.param(128, 80, 2, 1, torch.float32, False, marks=pytest.mark.long),
    pytest.param(64, 64, 1, 1, torch.float16, True, marks=pytest.mark.long),
    pytest.param(128, 128, 1, 1, torch.float32, True, marks=pytest.mark.matrix),
    pytest.param(256, 64, 3, 2, torch.bfloat16, True, marks=pytest.mark.matrix),
]
sizes = pytest.mark.parametrize(("num_rows", "num_columns", "num_heads", "group", "dtype", "at_random"), SIZES)


def check(
    compute: Recurrence, expected: Tensor, num_rows: int, num_columns: int, num_heads: int, at_random: bool
) -> None:
    """Compare with the tolerance of the CPU's kernels: products sum in float32, as the recurrence does."""

    def on_device(piece: slice, states: Tensor, *slots: Tensor) -> Tensor:
        placed = states.to(DEVICE)
        result = compute(piece, placed, *(part.to(DEVICE) for part in slots)).cpu()
        states.copy_(placed)
        return result

    def assert_same(result: Tensor, together: Tensor) -> None:
        if result.dim() > 2:  # a state, without the padding of its last panel
            result, together = (part.transpose(1, 2).flatten(2)[..., :num_columns] for part in (result, together))
        assert_near_float64(result, together.double(), 4)  # both have an error, and a piece of one token may be small

    cuts, shape = () if at_random else ENDS, state_shape(num_heads, num_rows, num_columns)
    together = check_cuts(on_device, shape, cuts, assert_same)
    assert_near_float64(together, expected)
    check_bits(on_device, shape, together[LAST], expected[LAST])


def check_bits(compute: Recurrence, shape: tuple[int, ...], together: Tensor, expected: Tensor) -> None:
    """Check that cuts of the last sequence at multiples of CHUNK change no bit, and neither do drafts, padding and other
    sequences of a step. `together`: its result in a step with other sequences."""

    def result_of(cuts: Iterable[int], *, with_drafts: bool = False) -> tuple[Tensor, Tensor]:
        """Return the result and the last state. Drafts follow each piece, or as many rows of no sequence; and padding."""
        state, rows, read = torch.full((2, *shape), torch.nan), list[Tensor](), -1
        for number, (first, end) in enumerate(pairwise([0, *cuts, len(expected)])):
            write, more = number % 2, min(3, len(expected) - end)
            last = end + more * with_drafts
            starts = torch.tensor([0, last - first, last - first])
            slots = torch.tensor([[read, -1], [write, -1], [end - first, 0], [last, 0]])
            rows.append(
                compute(slice(LAST.start + first, LAST.start + end + more), state, starts, *slots)[: end - first]
            )
            read = write
        return torch.cat(rows), state[read]

    whole, state = result_of([])
    assert whole.equal(together)
    off_border, state_off_border = result_of([16, 71])  # the first pieces after the cuts are of 16 tokens and of 25
    assert_near_float64(off_border, expected)
    for cuts in ([CHUNK, 2 * CHUNK, 3 * CHUNK], [2 * CHUNK], [4 * CHUNK]):
        result, last_state = result_of(cuts, with_drafts=len(cuts) == 1)
        assert result.equal(whole)
        assert last_state.equal(state)
        result, last_state = result_of(sorted([16, 71, *cuts]), with_drafts=len(cuts) > 1)
        assert result.equal(off_border)
        assert last_state.equal(state_off_border)
    if whole.dtype == torch.float32:  # rounding to fewer bits hides the difference
        assert not whole.equal(off_border), "no chunk was computed as one"


@sizes
def test_ssd(num_rows: int, num_columns: int, num_heads: int, group: int, dtype: torch.dtype, at_random: bool) -> None:
    num_groups, bounds = -(-num_heads // group), (0.001, 80.0)
    xbc = noise(T, num_heads * num_columns + 2 * num_groups * num_rows, dtype=dtype, seed=1)
    dt = 3 * noise(T, num_heads, dtype=dtype, seed=2)
    dt_bias, decay_log, skip = of_heads = noise(3, num_heads, dtype=torch.float32, seed=3)
    dt[100::9] = 60  # softplus(60) is 60: a strong decay within a chunk, whose later tokens keep their digits

    def compute(piece: slice, states: Tensor, *slots: Tensor) -> Tensor:
        inputs = (part.to(DEVICE) for part in (xbc[piece], dt[piece], *of_heads))
        return ssd(*inputs, states, group, num_columns, *bounds, *slots)

    heads = torch.arange(num_heads) // group
    x, *mixed = xbc.double().split([num_heads * num_columns, *[num_groups * num_rows] * 2], 1)
    keys, queries = (part.unflatten(1, (-1, num_rows))[:, heads] for part in mixed)
    step = softplus(dt.double() + dt_bias.double(), threshold=80).clamp(*bounds)
    parts = x.unflatten(1, (num_heads, -1)), keys, queries, step
    rates = decay_log.double().exp(), skip.double()
    expected = torch.cat([ssd_in_float64(*(part[piece] for part in parts), *rates) for piece in SEQUENCES])
    check(compute, expected.flatten(1), num_rows, num_columns, num_heads, at_random)


@sizes
def test_gated_delta(
    num_rows: int, num_columns: int, num_heads: int, group: int, dtype: torch.dtype, at_random: bool
) -> None:
    key_heads = [head // group for head in range(num_heads)]
    qkv = noise(T, 2 * (max(key_heads) + 1) * num_rows + num_heads * num_columns, dtype=dtype, seed=1)
    gates, of_heads = 3 * noise(2, T, num_heads, dtype=dtype, seed=2), noise(2, num_heads, dtype=torch.float32, seed=3)
    gates[0, 100::9] = 60  # as in ssd
    first = SEQUENCES[1].start
    # A repeated token, which nothing forgets: a sum of powers of L instead of a substitution would lose all digits.
    qkv[first : first + 40], gates[0, first : first + 40], gates[1, first : first + 40] = qkv[first], -9, 9

    def compute(piece: slice, states: Tensor, *slots: Tensor) -> Tensor:
        inputs = (part.to(DEVICE) for part in (qkv[piece], *gates[:, piece], *of_heads))
        return gated_delta(*inputs, states, group, num_columns, *slots)

    inputs = [(qkv[piece], [*gates[:, piece], *of_heads]) for piece in SEQUENCES]
    expected = torch.cat([gated_delta_in_float64(*parts, key_heads, (num_rows, num_columns)) for parts in inputs])
    check(compute, expected, num_rows, num_columns, num_heads, at_random)

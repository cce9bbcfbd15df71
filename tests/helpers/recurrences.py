"""Recurrent operators with states in slots, compared with themselves in other cuts."""

from collections.abc import Callable

import torch
from torch import Tensor

NUM_SLOTS = 7
LENGTHS = [1, 63, 0, 5, 150]
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
SEQUENCES = [slice(start, start + length) for start, length in zip(STARTS.tolist(), LENGTHS, strict=False)]

# Root mean square of the error, relative to the result's. Only the result is rounded.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}

Recurrence = Callable[..., Tensor]
"""Computes a slice of the tokens: of the slice, states, query_starts, reads, writes, ends."""


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near_float64(result: Tensor, expected: Tensor) -> None:
    error = (result.double() - expected).square().mean().sqrt()
    assert error <= TOLERANCES[result.dtype] * expected.square().mean().sqrt()


def compute_sequences(compute: Recurrence, state_shape: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the result of all sequences together, and the states after the sequences that store one, by sequence."""
    states = torch.full((NUM_SLOTS, *state_shape), torch.nan)
    reads, writes = torch.full((len(LENGTHS),), -1), torch.tensor([3, -1, 5, 0, 6])
    result = compute(slice(None), states, STARTS, reads, writes, STARTS[1:])
    assert states[[1, 2, 4, 5]].isnan().all()  # of no sequence, or of one without a token
    return result, {s: states[slot] for s, slot in enumerate(writes.tolist()) if slot >= 0 and LENGTHS[s]}


def check_cuts(compute: Recurrence, state_shape: tuple[int, ...]) -> Tensor:
    """Return the result of all sequences together. Check that each sequence in pieces has the same bits. Its states
    pass through slots with old values, and drafts follow the pieces."""
    together, last_states = compute_sequences(compute, state_shape)
    generator = torch.Generator().manual_seed(6)
    for s, (start, length) in enumerate(zip(STARTS.tolist(), LENGTHS, strict=False)):
        cuts = torch.randint(0, length + 1, (4,), generator=generator).sort().values.tolist()
        read, state = -1, torch.full((2, *state_shape), torch.inf)
        for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            write = number % 2 if number < 3 else max(read, 0)  # also in place
            num_drafts = min(number, length - end)  # which the state must not contain
            piece = slice(start + first, start + end + num_drafts)
            starts_of_piece = torch.tensor([0, end + num_drafts - first])
            result = compute(piece, state, starts_of_piece, *torch.tensor([[read], [write], [end - first]]))
            assert result.equal(together[piece])
            read = write if len(result) else read
        if s in last_states:
            assert last_states[s].equal(state[read])
    return together

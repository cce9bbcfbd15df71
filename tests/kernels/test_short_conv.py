"""short_conv compared with torch's convolution in float64, and with itself in other cuts."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.short_conv import short_conv
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.recurrences import STARTS, check_instruction_sets
from tests.helpers.ways import any_way

NUM_SLOTS = 7
LENGTHS = [1, 63, 0, 5, 1000]
# Root mean square of the error, relative to the result's. The kernel rounds a product, the sum and the result.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def noise(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(projected: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result [T, C] of a whole sequence."""
    channels = weight.shape[1]
    b, c, x = projected.double().T.chunk(3) if projected.shape[1] == 3 * channels else (1, None, projected.double().T)
    inputs = functional.pad(b * x, (len(weight) - 1, 0))
    kernel, bias = weight.double().T[:, None], None if bias is None else bias.double()
    total = functional.conv1d(inputs[None], kernel, bias, groups=channels)[0]
    return (functional.silu(total) if c is None else c * total).T


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("channels, num_taps, threads", [(1, 2, 1), (80, 3, 2), (300, 4, 3), (33, 9, 2)])
@poisoned()
def test_any_cut_has_the_bits_of_the_whole(channels: int, num_taps: int, threads: int, dtype: torch.dtype) -> None:
    """All sequences together, and each in pieces whose states pass through slots with old values. Drafts follow the
    pieces."""
    set_threads(threads)
    weight, generator = noise(num_taps, channels, dtype=dtype, seed=1), torch.Generator().manual_seed(2)
    bias = noise(channels, dtype=dtype, seed=3) if channels % 2 else None
    projected = noise(sum(LENGTHS), channels * (1 if channels % 3 else 3), dtype=dtype, seed=4)
    check_instruction_sets(
        # a convolution does not use the context lengths, the last of the slots' arguments
        lambda piece, *slots: short_conv(projected[: STARTS[-1]][piece], weight, bias, *slots[:-1]),
        (num_taps - 1, channels),
        dtype,
    )
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    states = torch.full((NUM_SLOTS, num_taps - 1, channels), torch.nan, dtype=dtype)
    reads, writes = torch.full((len(LENGTHS),), -1), torch.tensor([3, -1, 5, 0, 6])
    whole = short_conv(projected, weight, bias, states, starts, reads, writes, starts[1:])
    assert states[[1, 2, 4, 5]].isnan().all()  # of no sequence, or of one without a token
    for s, start, length in zip(range(5), starts.tolist(), LENGTHS, strict=False):
        rows = slice(start, start + length)
        if length:
            expected = in_float64(projected[rows], weight, bias)
            error = (whole[rows].double() - expected).square().mean().sqrt()
            assert error <= TOLERANCES[dtype] * expected.square().mean().sqrt()
        cuts = torch.randint(0, length + 1, (4,), generator=generator).sort().values.tolist()
        read, state = -1, torch.full((2, num_taps - 1, channels), torch.inf, dtype=dtype)
        for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True)):
            write = number % 2 if number < 3 else max(read, 0)  # also in place
            num_drafts = min(number, length - end)  # which the state must not contain
            piece = projected[start + first : start + end + num_drafts]
            arguments = torch.tensor([[read], [write], [end - first]])
            result = short_conv(piece, weight, bias, state, torch.tensor([0, len(piece)]), *arguments)
            assert result.equal(whole[start + first : start + end + num_drafts])
            read = write if len(piece) else read
        if length and writes[s] >= 0:
            assert states[writes[s]].equal(state[read])

"""ssd compared with its dual form, an attention without softmax, in float64; and with itself in other cuts."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kernels.ssd import ssd, state_shape
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.recurrences import (
    SEQUENCES,
    STARTS,
    assert_near_float64,
    check_cuts,
    check_instruction_sets,
    noise,
    ssd_in_float64,
)
from tests.helpers.ways import any_way

BOUNDS = {torch.float32: (0.0, torch.inf), torch.bfloat16: (0.25, 2.0), torch.float16: (0.001, 1.5)}  # of the step


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each(
    "num_states, channels, group, num_heads, threads",
    [(8, 5, 1, 1, 1), (33, 80, 2, 4, 3), (64, 32, 3, 3, 2), (256, 31, 2, 3, 2)],
)
@poisoned()
def test_any_cut_has_the_bits_of_the_whole(
    num_states: int, channels: int, group: int, num_heads: int, threads: int, dtype: torch.dtype
) -> None:
    set_threads(threads)
    num_tokens, num_groups, bounds = int(STARTS[-1]), -(-num_heads // group), BOUNDS[dtype]
    xbc = noise(num_tokens, num_heads * channels + 2 * num_groups * num_states, dtype=dtype, seed=1)
    dt = 3 * noise(num_tokens, num_heads, dtype=dtype, seed=2)
    dt_bias, decay_log, skip = (noise(num_heads, dtype=torch.float32, seed=seed) for seed in (3, 4, 5))
    dt[-1] = 60  # softplus(60) is 60, and the state decays to zeros without a bound

    def compute(piece: slice, states: Tensor, *slots: Tensor) -> Tensor:
        of_heads = dt_bias, decay_log, skip
        return ssd(xbc[piece], dt[piece], *of_heads, states, group, channels, *bounds, *slots)

    check_instruction_sets(compute, state_shape(num_heads, num_states, channels))
    result = check_cuts(compute, state_shape(num_heads, num_states, channels))
    sizes = [num_heads * channels, num_groups * num_states, num_groups * num_states]
    x, keys, queries = xbc.double().split(sizes, 1)
    heads = torch.arange(num_heads) // group
    keys, queries = (part.unflatten(1, (-1, num_states))[:, heads] for part in (keys, queries))
    step = softplus(dt.double() + dt_bias.double(), threshold=80).clamp(*bounds)
    parts = x.unflatten(1, (num_heads, -1)), keys, queries, step
    of_heads = decay_log.double().exp(), skip.double()
    expected = torch.cat([ssd_in_float64(*(part[piece] for part in parts), *of_heads) for piece in SEQUENCES])
    assert_near_float64(result, expected.flatten(1))

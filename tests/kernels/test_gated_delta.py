"""gated_delta compared with the formula in float64, and with itself in other cuts."""

from typing import Any

import torch
from torch import Tensor

from kernels.gated_delta import gated_delta, state_shape
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.recurrences import (
    SEQUENCES,
    STARTS,
    assert_near_float64,
    check_cuts,
    check_instruction_sets,
    gated_delta_in_float64,
    noise,
)
from tests.helpers.ways import any_way


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each(
    "num_keys, num_values, group, key_heads, threads",
    [(8, 5, 1, [0], 1), (33, 80, 1, [0, 1, 0, 1], 3), (64, 32, 2, [0, 0, 1], 2)],
)
@poisoned()
def test_any_cut_has_the_bits_of_the_whole(
    num_keys: int, num_values: int, group: int, key_heads: list[int], threads: int, dtype: torch.dtype
) -> None:
    set_threads(threads)
    num_heads, num_tokens = len(key_heads), int(STARTS[-1])
    qkv = noise(num_tokens, 2 * (max(key_heads) + 1) * num_keys + num_heads * num_values, dtype=dtype, seed=1)
    write_gate = 3 * noise(num_tokens, num_heads, dtype=dtype, seed=3)
    for num_decays in (num_heads, num_heads * num_keys):
        decay = 3 * noise(num_tokens, num_decays, dtype=dtype, seed=2)
        logs = [noise(size, dtype=torch.float32, seed=seed) for size, seed in ((num_heads, 4), (num_decays, 5))]
        decay[-1] = 60  # softplus(60) is 60, and the state decays to zeros

        def compute(piece: slice, states: Tensor, *slots: Tensor, decay: Tensor = decay, logs: Any = logs) -> Tensor:
            return gated_delta(qkv[piece], decay[piece], write_gate[piece], *logs, states, group, num_values, *slots)

        check_instruction_sets(compute, state_shape(num_heads, num_keys, num_values))
        result = check_cuts(compute, state_shape(num_heads, num_keys, num_values))
        inputs = [(qkv[piece], [decay[piece], write_gate[piece], *logs]) for piece in SEQUENCES]
        expected = [gated_delta_in_float64(*parts, key_heads, (num_keys, num_values)) for parts in inputs]
        assert_near_float64(result, torch.cat(expected))

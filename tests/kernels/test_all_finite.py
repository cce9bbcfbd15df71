"""all_finite against a number put anywhere."""

import math

import pytest
import torch

from kernels.all_finite import all_finite


@pytest.mark.usefixtures("any_way", "poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 63, 2 * 65536 + 1])
def test_finds_what_is_not_finite_wherever_it_is(dtype: torch.dtype, count: int) -> None:
    x = torch.linspace(-1, 1, count).to(dtype)
    if count:
        x[0], x[-1] = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    assert all_finite(x).tolist() is True
    for place in {0, count // 2, count - 1} if count else set():
        for number in (math.nan, math.inf, -math.inf):
            damaged = x.clone()
            damaged[place] = number
            assert all_finite(damaged).tolist() is False

"""all_finite with one non-finite number at any position."""

import math

import torch

from kernels.all_finite import all_finite
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("shape", [(0, 5), (1, 0), (1, 1), (3, 63), (5, 65536 + 1), (200, 1000)])
@poisoned()
def test_finds_the_rows_that_are_not_finite_wherever_it_shows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.linspace(-1, 1, math.prod(shape)).to(dtype).view(shape)
    if x.numel():
        x[0, 0], x[-1, -1] = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    num_rows, num_channels = shape
    assert all_finite(x).tolist() == [True] * num_rows
    for row in {0, num_rows // 2, num_rows - 1} if x.numel() else set():
        for place in {0, num_channels // 2, num_channels - 1}:
            for number in (math.nan, math.inf, -math.inf):
                damaged = x.clone()
                damaged[row, place] = number
                assert all_finite(damaged).tolist() == [other != row for other in range(num_rows)]
    if x.numel():
        assert all_finite(x.T / 0.0).tolist() == [False] * num_channels  # a view that is not contiguous

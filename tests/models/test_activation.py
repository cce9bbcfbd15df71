"""An element's activation has the same bits at every position."""

import torch

from kernels.gelu import gelu, gelu_tanh
from kernels.soft_cap import soft_cap
from kernels.swiglu import swiglu
from tests.helpers.cases import each


@each("threads", [1, 2, 3])
@each("width", [3, 8, 16, 24, 88, 100, 176, 5632])
def test_a_row_is_the_same_in_any_number_of_rows(width: int, threads: int) -> None:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function in (gelu, gelu_tanh, lambda rows: soft_cap(rows, 2.0), lambda rows: swiglu(rows, rows)):
            batch_result = function(x)
            for first in range(0, 40, 3):
                for last in (first + 1, min(40, first + 5), 40):
                    assert function(x[first:last]).equal(batch_result[first:last])
    finally:
        torch.set_num_threads(before)

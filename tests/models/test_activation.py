"""Activations against torch's, and the same bits for an element wherever it stands."""

import pytest
import torch

from kernels.swiglu import swiglu
from models.layers.activation import gelu_tanh


def test_gelu_tanh_equals_torch() -> None:
    x = torch.linspace(-30, 30, 10_001)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(gelu_tanh(x).double(), expected, rtol=1e-6, atol=2e-6)  # 1 + tanh loses digits near -1
    rounded = gelu_tanh(x.bfloat16()).float() - torch.nn.functional.gelu(x.bfloat16(), approximate="tanh").float()
    assert rounded.abs().max() <= 2**-8 * 30  # one rounding of bfloat16 at most


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [16, 88, 100, 176, 5632])
def test_a_row_is_the_same_in_any_number_of_rows(width: int, threads: int) -> None:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function in (gelu_tanh, lambda rows: swiglu(rows, rows)):
            whole = function(x)
            for first in range(0, 40, 3):
                for last in (first + 1, min(40, first + 5), 40):
                    assert function(x[first:last]).equal(whole[first:last])
    finally:
        torch.set_num_threads(before)

"""Activations against torch's, and the same bits for an element wherever it stands."""

import pytest
import torch

from kernels.gelu import gelu, gelu_tanh
from kernels.swiglu import swiglu
from models.layers.activation import sigmoid


def test_sigmoid_equals_torch() -> None:
    x = torch.cat((torch.linspace(-100, 100, 10_001), torch.tensor([-torch.inf, torch.inf])))
    # exp of float32 has an error of one unit, and its result one rounding more: a few units of the last place
    torch.testing.assert_close(sigmoid(x).double(), x.double().sigmoid(), rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [3, 8, 16, 24, 88, 100, 176, 5632])
def test_a_row_is_the_same_in_any_number_of_rows(width: int, threads: int) -> None:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function in (gelu, gelu_tanh, sigmoid, lambda rows: swiglu(rows, rows)):
            whole = function(x)
            for first in range(0, 40, 3):
                for last in (first + 1, min(40, first + 5), 40):
                    assert function(x[first:last]).equal(whole[first:last])
    finally:
        torch.set_num_threads(before)

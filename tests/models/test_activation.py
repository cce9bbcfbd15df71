"""Activations against torch's, and the same bits for an element wherever it stands."""

import pytest
import torch

from kernels.swiglu import swiglu
from models.layers.activation import gelu, gelu_tanh, sigmoid


def test_gelu_tanh_equals_torch() -> None:
    x = torch.linspace(-30, 30, 10_001)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(gelu_tanh(x).double(), expected, rtol=1e-6, atol=2e-6)  # 1 + tanh loses digits near -1
    rounded = gelu_tanh(x.bfloat16()).float() - torch.nn.functional.gelu(x.bfloat16(), approximate="tanh").float()
    assert rounded.abs().max() <= 2**-8 * 30  # one rounding of bfloat16 at most


def test_gelu_equals_torch() -> None:
    x = torch.linspace(-30, 30, 10_001)
    expected = torch.nn.functional.gelu(x.double())
    torch.testing.assert_close(gelu(x).double(), expected, rtol=1e-6, atol=2e-6)  # 1 + erf loses digits near -1


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

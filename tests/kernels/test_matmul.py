"""The dense product compared with float64, and bits that do not depend on the batch and the number of threads."""

import pytest
import torch
from torch import Tensor

from kernels import build
from kernels.linear import FloatWeight, matmul, pack
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

ROWS = [1, 2, 3, 7, 8, 9, 63, 65]
OUTPUTS = [1, 15, 16, 17, 100]
INPUTS = [8, 31, 32, 64, 65, 127, 1000, 4096]
# Of the sum of magnitudes. float32: 4096 additions round by 2^-24 each, mostly in both directions. Other dtypes: the
# result is rounded once.
TOLERANCES = [(torch.float32, 2**-20), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@any_way
@each("dtype, tolerance", TOLERANCES)
@poisoned()
def test_equals_float64_and_with_the_kernels_itself_in_any_batch(dtype: torch.dtype, tolerance: float) -> None:
    for num_outputs in OUTPUTS:
        for num_inputs in INPUTS:
            weight, x = randn(num_outputs, num_inputs, dtype=dtype), randn(max(ROWS), num_inputs, dtype=dtype)
            bias = randn(num_outputs, dtype=dtype) if num_outputs % 2 else None
            packed = pack(weight)
            assert torch.equal(packed.unpack(), weight)
            expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
            if bias is not None:
                expected, size = expected + bias.double(), size + bias.double().abs()
            batch_result = matmul(x, packed, bias)
            assert batch_result.dtype == dtype
            assert ((batch_result - expected).abs() <= tolerance * size).all()
            for num_rows in ROWS:
                part = matmul(x[:num_rows], packed, bias)
                assert ((part - expected[:num_rows]).abs() <= tolerance * size[:num_rows]).all()
                assert build.library() is None or torch.equal(part, batch_result[:num_rows])


@compiled
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_rows_or_threads(dtype: torch.dtype) -> None:
    packed, x = pack(randn(100, 321, dtype=dtype)), randn(512, 321, dtype=dtype)
    set_threads(1)
    batch_result = matmul(x, packed)
    for num_threads in (1, 2, 3, 4):
        set_threads(num_threads)
        for num_rows in [*range(1, 41), 64, 65, 512]:
            assert torch.equal(matmul(x[-num_rows:], packed), batch_result[-num_rows:]), (num_threads, num_rows)


@any_way
def test_no_rows_no_columns_and_strided_rows() -> None:
    weight, x = randn(17, 32), randn(5, 64)
    assert matmul(x[:0, :32], pack(weight)).shape == (0, 17)
    assert torch.equal(matmul(x[:, ::2], pack(weight)), matmul(x[:, ::2].contiguous(), pack(weight)))


@any_way
def test_nan_and_infinity_stay_in_their_row() -> None:
    x = randn(3, 32)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    result = matmul(x, pack(randn(17, 32)))
    assert result[0].isfinite().all()
    assert result[1].isnan().all()
    assert not result[2].isfinite().any()


def test_rows_weights_and_biases_that_do_not_fit_are_refused() -> None:
    packed = pack(randn(17, 32))
    with pytest.raises(ValueError, match=r"rows \[2, 31\] cannot be multiplied by a weight of 32 inputs"):
        matmul(randn(2, 31), packed)
    with pytest.raises(ValueError, match="rows of torch.bfloat16 cannot be multiplied by a weight of torch.float32"):
        matmul(randn(2, 32, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match=r"a bias \[16\] of torch.float32 for 17 outputs of torch.float32"):
        matmul(randn(2, 32), packed, randn(16))
    with pytest.raises(
        ValueError, match="a weight of torch.float64 cannot be packed: only torch.float32, torch.bfloat"
    ):
        pack(randn(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="packed weights cannot be of torch.float64"):
        FloatWeight(torch.zeros(2, 32, 16, 1, dtype=torch.float64), 17, 32)
    with pytest.raises(
        ValueError, match=r"packed weights \[2, 32, 16, 1\] cannot be \[2, 16, 16, 2\] of torch.float16"
    ):
        FloatWeight(torch.zeros(2, 16, 16, 2, dtype=torch.float16), 17, 32)

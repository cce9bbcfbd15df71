"""The product with an unpacked weight: with the C++ kernels it has the bits of the packed weight, without them torch's
bits."""

import pytest
import torch
from torch import Tensor

from kernels.linear import linear, linear_per_head, matmul, pack
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LONG_DTYPES = [pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:]]
ROWS = [1, 2, 3, 5, 11, 12, 13, 25, 64, 101, 300]  # the last shapes also divide the rows among threads
SHAPES = [(1, 64), (33, 40), (96, 7), (16, 16), (70, 321), (256, 704), (512, 2048)]  # outputs, inputs


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def bits_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product with the packed weight."""
    return matmul(x, pack(weight), bias)


@pytest.mark.parametrize("dtype", [torch.float32, *LONG_DTYPES])
@compiled
@poisoned()
def test_has_the_bits_of_the_packed_product(dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES:
        weight, x = randn(outputs, inputs, dtype=dtype), randn(max(ROWS), inputs, dtype=dtype)
        bias = randn(outputs, dtype=dtype) if outputs % 2 else None
        set_threads(1)
        expected = bits_of(x, weight, bias)
        lies = [
            weight,
            weight.T.contiguous().T,
            torch.stack((weight, weight), -1)[..., 0],
        ]  # by inputs, outputs, neither
        for num_threads, num_rows, held in zip((1, 2, 3, 4) * 3, ROWS, lies * 4, strict=False):
            set_threads(num_threads)
            assert torch.equal(linear(x[-num_rows:], held, bias), expected[-num_rows:]), (outputs, inputs, num_rows)
            assert torch.equal(linear(x[:num_rows], held, bias), expected[:num_rows]), (outputs, inputs, num_rows)


@pytest.mark.long
@compiled
@each("dtype", DTYPES)
@each("heads, inputs, outputs", [(4, 12, 24), (3, 24, 10), (16, 128, 512), (2, 512, 128)])
@poisoned()
def test_every_head_has_the_bits_of_its_own_product(dtype: torch.dtype, heads: int, inputs: int, outputs: int) -> None:
    set_threads(3)
    wide = randn(heads, outputs + 8, inputs, dtype=dtype)
    x = randn(max(ROWS), heads, inputs + 8, dtype=dtype)[..., :inputs]  # a part of each head
    for weight in (wide[:, 8:], wide[:, 8:].transpose(1, 2).contiguous().transpose(1, 2)):
        expected = torch.stack([bits_of(x[:, head], weight[head]) for head in range(heads)], 1)
        for count in ROWS:
            assert torch.equal(linear_per_head(x[-count:], weight), expected[-count:]), count


@any_way
@each("dtype", DTYPES)
def test_equals_torch(dtype: torch.dtype) -> None:
    x, weight, bias = randn(9, 65, dtype=dtype), randn(17, 65, dtype=dtype), randn(17, dtype=dtype)
    # Sums of 65 products of size 1 in another order; a half-precision result is rounded once.
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 2**-7}
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(linear(x, weight, bias), expected, **tolerance)
    heads = torch.stack((x, x + 1), 1)
    weights = torch.stack((weight, -weight))
    expected = torch.einsum("mhk,hnk->mhn", heads, weights)
    torch.testing.assert_close(linear_per_head(heads, weights), expected, **tolerance)


@any_way
def test_missing_and_mismatched_arguments() -> None:
    x, weight = randn(3, 8, dtype=torch.float32), randn(5, 8, dtype=torch.float32)
    assert linear(x[:0], weight).shape == (0, 5)
    assert linear(x, weight[:0]).shape == (3, 0)
    assert linear(x[:, :0], weight[:, :0], weight[:, 0]).equal(weight[:, 0].expand(3, 5))
    assert linear(x.double(), weight.double()).dtype == torch.float64  # has no kernels
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(x[:, :7], weight)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, weight.bfloat16())
    with pytest.raises(RuntimeError, match="[Ee]xpected"):
        linear_per_head(x[:, None], torch.stack((weight, weight)))


@compiled
@each("dtype", DTYPES)
@poisoned()
def test_no_inputs_give_the_bias(dtype: torch.dtype) -> None:
    """For any number of rows, in memory that held another product."""
    set_threads(1)
    weight, bias = randn(20, 64, dtype=dtype), randn(20, dtype=dtype)
    for num_rows in ROWS:
        x = randn(num_rows, 64, dtype=dtype)
        linear(x, weight)
        assert linear(x[:, :0], weight[:, :0], bias).equal(bias.expand(num_rows, 20))

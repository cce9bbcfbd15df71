"""layer_norm compared with the formula in float64; layer_norm_quantize with the codes of its rows, bit for bit."""

import torch
from torch import Tensor

from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.quantize_rows import reference
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]  # one rounding of half an ulp
SHAPES = [(1, 8), (63, 80), (1000, 129), (0, 16)]


def rows(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 3 + 5  # far from 0: the mean must be subtracted before squaring
    weight, bias = torch.randn(2, shape[1], generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@any_way
@each("shape", SHAPES)
@each("dtype, tolerance", DTYPES)
@each("has_weight, has_bias", [(True, True), (True, False), (False, True), (False, False)])
@poisoned()
def test_equals_formula(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float, has_weight: bool, has_bias: bool
) -> None:
    x, weight, bias = rows(shape, dtype)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * weight.double() if has_weight else expected
    expected = expected + bias.double() if has_bias else expected
    result = layer_norm(x, weight if has_weight else None, bias if has_bias else None, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=4e-6)  # weight and bias may cancel


@any_way
def test_eps_keeps_equal_channels_finite() -> None:
    assert layer_norm(torch.full((2, 5), 7.0), torch.ones(5), torch.ones(5), 1e-6).tolist() == [[1.0] * 5] * 2


@any_way
@each("dtype", [torch.int8, torch.float8_e4m3fn])
@each("group_size", [None, 32])
@each("static", [False, True])
@poisoned()
def test_codes_of_its_rows(dtype: torch.dtype, group_size: int | None, static: bool) -> None:
    x, weight, bias = rows((63, 80), torch.bfloat16)
    x[1], x[2, 3] = 5, torch.nan
    format = (dtype, None if static else group_size, torch.tensor([0.02]) if static else None)
    codes, scales = layer_norm_quantize(x, weight, bias, 1e-5, *format)
    wanted, wanted_scales = reference.quantize_rows(layer_norm(x, weight, bias, 1e-5), *format)
    assert scales[2].isnan().any()
    assert torch.equal(scales.nan_to_num(-1), wanted_scales.nan_to_num(-1))
    finite = torch.arange(63) != 2
    assert torch.equal(codes[finite].float(), wanted[finite].float())


@compiled
def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    x, weight, bias = rows((300, 599), torch.float32)
    alone = torch.cat([layer_norm(row, weight, bias, 1e-5) for row in x.split(1)])
    for threads in range(1, 5):
        set_threads(threads)
        assert torch.equal(layer_norm(x, weight, bias, 1e-5), alone)

"""Rows as codes, from quantize_rows and from the operators with fused quantisation (norms and activations): compared
with the formula in float64, and bit for bit with each other."""

import torch
from torch import Tensor

from kernels.quantize_rows import ActivationFormat, quantize_rows, reference
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from kernels.swiglu import swiglu, swiglu_quantize
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

INT8, FP8 = ActivationFormat(torch.int8), ActivationFormat(torch.float8_e4m3fn)
CODES = [INT8, FP8, ActivationFormat(torch.float8_e4m3fn, 32), ActivationFormat(torch.float8_e4m3fn, 128)]
SHAPES = [(1, 8), (0, 16), (5, 1), (20, 17), (63, 80), (20, 1000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(dtype)


def assert_same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare bit for bit, except the bits of NaN."""
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        torch.testing.assert_close(result.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@any_way
@each("codes", CODES)
@each("num_inputs", [1, 15, 16, 17, 1000])
@poisoned()
def test_equals_formula(codes: ActivationFormat, num_inputs: int) -> None:
    x, largest = randn(20, num_inputs), 127 if codes == INT8 else 448
    x[3] = 0
    x[5] = torch.arange(num_inputs) + 0.5  # ties
    x[5, 0] = 127
    codes_found, scales = quantize_rows(x, *codes[:2])
    size = codes.group_size or num_inputs
    assert (codes_found.dtype, scales.shape) == (codes.dtype, (20, -(-num_inputs // min(size, num_inputs))))
    for group, (part, group_input) in enumerate(zip(codes_found.split(size, 1), x.split(size, 1), strict=True)):
        scale = group_input.abs().amax(1, keepdim=True) / largest
        scale[scale == 0] = 1
        assert torch.equal(scales[:, group, None], scale)
        ratio = group_input.double() / scale.double()
        # float8 has 3 bits after its first; if the ratio's float32 rounds to a tie, the code may be on its other side
        half_step = 0.5 if codes == INT8 else (ratio.abs() * 2**-4).clamp(min=2**-10)
        assert ((part.double() - ratio).abs() <= half_step + 1e-5 * ratio.abs()).all()
    assert not codes_found[3].float().any()
    assert_same(quantize_rows(x.double(), *codes[:2]), (codes_found, scales))


@any_way
def test_ties_become_even() -> None:
    codes, scales = quantize_rows(torch.tensor([[127, 0.5, 1.5, -2.5, -3.5, 126.5]]))
    assert codes.tolist() == [[127, 0, 2, -2, -4, 126]]
    assert scales.tolist() == [[1.0]]


@any_way
@each("dtype", DTYPES)
def test_float8_codes_match_torch(dtype: torch.dtype) -> None:
    """With a scale of 1: numbers at, next to and between all codes, and beyond them."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles, ulp = (codes[1:] + codes[:-1]) / 2, 1 + 2**-20
    numbers = torch.cat([codes, middles, middles * ulp, middles / ulp, codes * ulp, torch.tensor([449.0, 1e30])])
    x = torch.cat([numbers, -numbers])[None].to(dtype).clamp(-6e4, 6e4)
    result, scales = quantize_rows(x, torch.float8_e4m3fn, None, torch.ones(1))
    assert result.view(torch.uint8).equal(x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert scales.tolist() == [[1.0]]


@any_way
@each("codes", CODES)
@each("dtype", DTYPES)
@each("num_scales", [1, 20])
@poisoned()
def test_static_scales(codes: ActivationFormat, dtype: torch.dtype, num_scales: int) -> None:
    """Codes saturate, and rows that are not finite have the scale NaN. A norm and a gate make the same codes."""
    x, weight, residual = odd_rows((20, 144), dtype), randn(144, dtype=dtype), randn(20, 144, dtype=dtype)
    arguments = (*codes[:2], torch.linspace(1e-4, 0.02, num_scales))
    assert_same(quantize_rows(x, *arguments), reference.quantize_rows(x, *arguments))
    assert_same(quantize_rows(x * 1e-3, *arguments), reference.quantize_rows(x * 1e-3, *arguments))
    assert_same(
        rms_norm_quantize(x, weight, 1e-5, *arguments), reference.quantize_rows(rms_norm(x, weight, 1e-5), *arguments)
    )
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    expected = (*reference.quantize_rows(normed, *arguments), total)
    assert_same(add_rms_norm_quantize(x, residual, weight, 1e-5, *arguments), expected)
    assert_same(swiglu_quantize(x, residual, *arguments), reference.quantize_rows(swiglu(x, residual), *arguments))


def odd_rows(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return rows with zeros, NaN and infinities, and with magnitudes whose scale the dtype cannot represent."""
    x = randn(*shape, dtype=dtype)
    if len(x) > 6:
        x[1], x[2, 0], x[3, -1], x[4, 0] = 0, torch.nan, torch.inf, -torch.inf
        x[5] *= 1e-4
    return x


@any_way
@each("codes", CODES)
@each("dtype", DTYPES)
@each("shape", SHAPES)
@poisoned()
def test_a_norm_makes_the_codes_of_its_rows(
    shape: tuple[int, int], dtype: torch.dtype, codes: ActivationFormat
) -> None:
    x, weight = odd_rows(shape, dtype), randn(shape[1], dtype=dtype)
    residual = randn(shape[0], 2 * shape[1], dtype=dtype)[:, ::2]
    expected = reference.quantize_rows(rms_norm(x, weight, 1e-5), *codes[:2])
    assert_same(rms_norm_quantize(x, weight, 1e-5, *codes[:2]), expected)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    expected = reference.quantize_rows(normed, *codes[:2])
    assert_same(add_rms_norm_quantize(x, residual, weight, 1e-5, *codes[:2]), (*expected, total))
    if len(x) > 6:
        assert expected[1][2:5, 0].isnan().any(0)
        assert expected[1][[0, 1, 5]].isfinite().all()


@any_way
@each("codes", CODES)
@each("dtype", DTYPES)
@each("shape", SHAPES)
@poisoned()
def test_swiglu_makes_the_codes_of_its_rows(
    shape: tuple[int, int], dtype: torch.dtype, codes: ActivationFormat
) -> None:
    gate, up = odd_rows((shape[0], 2 * shape[1]), dtype).chunk(2, dim=1)  # halves of one matrix
    assert_same(swiglu_quantize(gate, up, *codes[:2]), reference.quantize_rows(swiglu(gate, up), *codes[:2]))


@compiled
def test_bits_do_not_depend_on_rows_or_threads() -> None:
    x, residual, weight = randn(300, 599), randn(300, 599), randn(599)
    set_threads(1)
    alone = [
        add_rms_norm_quantize(*pair, weight, 1e-5, *INT8[:2])
        for pair in zip(x.split(1), residual.split(1), strict=True)
    ]
    expected = tuple(torch.cat(parts) for parts in zip(*alone, strict=True))
    for threads in range(1, 5):
        set_threads(threads)
        assert_same(add_rms_norm_quantize(x, residual, weight, 1e-5, *INT8[:2]), expected)
        assert_same(rms_norm_quantize(residual + x, weight, 1e-5, *INT8[:2]), expected[:2])
        assert_same(quantize_rows(rms_norm(residual + x, weight, 1e-5)), expected[:2])


@any_way
def test_dtypes_that_no_kernel_takes() -> None:
    x, residual, weight = randn(3, 40).double(), randn(3, 40).double(), randn(40)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    result = add_rms_norm_quantize(x, residual, weight, 1e-5, *INT8[:2])
    assert_same(result, (*reference.quantize_rows(normed), total))

"""rms_norm and gated_rms_norm compared with the formulas in float64; add_rms_norm with rms_norm of torch's sum, bit
for bit."""

from itertools import product

import torch

from kernels.gated_rms_norm import gated_rms_norm
from kernels.quantize_rows import quantize_rows
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]  # two roundings of half an ulp


@any_way
@each("shape", [(1, 8), (63, 80), (1000, 129)])
@each("dtype, tolerance", DTYPES)
@poisoned()
def test_equals_formula(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    mean = (x.double() ** 2).sum(-1, keepdim=True) / shape[1]
    expected = x.double() / (mean + 1e-5).sqrt() * weight.double()
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@any_way
@each("shape", [(1, 8), (63, 80), (1000, 129)])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@poisoned()
def test_with_an_offset_nothing_is_rounded_before_the_end(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bit for bit the norm of float32 rows times offset + weight, which would lose digits in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = (torch.randn(shape[1], generator=generator) * 0.01).to(dtype)
    expected = rms_norm(x.float(), 1 + weight.float(), 1e-5).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-5, 1.0), expected)
    if dtype == torch.bfloat16 and shape[0] > 1:
        assert not torch.equal(rms_norm(x, 1 + weight, 1e-5), expected)
    result = rms_norm_quantize(x, weight, 1e-5, torch.int8, None, None, 1.0)
    for part, wanted in zip(result, quantize_rows(expected), strict=True):
        assert torch.equal(part, wanted)


def test_eps_keeps_zeros_finite() -> None:
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6).tolist() == [[0.0] * 4] * 2


@compiled
def test_a_row_is_the_same_to_the_bit_in_any_company() -> None:
    x, weight = torch.randn(300, 5, 99), torch.randn(99)  # as heads of queries
    alone = torch.stack([rms_norm(row[None], weight, 1e-5)[0] for row in x])
    for threads in range(1, 5):
        set_threads(threads)
        assert torch.equal(rms_norm(x, weight, 1e-5), alone)


@any_way
@each("shape", [(1, 8), (63, 80), (1000, 129), (0, 16)])
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@poisoned()
def test_a_sum_is_rounded_before_it_is_normed(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(2, *shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    for offset in (None, 1.0):
        normed, total = add_rms_norm(x, residual, weight, 1e-5, offset)
        assert total.dtype == normed.dtype == dtype
        assert torch.equal(total, residual + x)
        assert torch.equal(normed, rms_norm(residual + x, weight, 1e-5, offset))
        parts = add_rms_norm_quantize(x, residual, weight, 1e-5, torch.int8, None, None, offset)
        for part, wanted in zip(parts, (*quantize_rows(normed), total), strict=True):
            assert torch.equal(part, wanted)


@any_way
def test_a_sum_with_nan_or_infinity_stays_in_its_row() -> None:
    x, residual = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 3], x[2, 5], residual[2, 5] = torch.nan, torch.inf, -torch.inf
    normed, total = add_rms_norm(x, residual, torch.ones(32).bfloat16(), 1e-5)
    assert torch.equal(total.isnan(), (x + residual).isnan())
    assert normed[1:3].isnan().all()
    assert normed[[0, 3]].isfinite().all()


@compiled
def test_a_row_of_a_sum_is_the_same_to_the_bit_in_any_company() -> None:
    x, residual, weight = torch.randn(300, 599), torch.randn(300, 2 * 599)[:, ::2], torch.randn(599)
    set_threads(1)
    pairs = zip(x.split(1), residual.split(1), strict=True)
    alone = [torch.cat(parts) for parts in zip(*(add_rms_norm(*pair, weight, 1e-5) for pair in pairs), strict=True)]
    for threads in range(1, 5):
        set_threads(threads)
        for result, expected in zip(add_rms_norm(x, residual, weight, 1e-5), alone, strict=True):
            assert torch.equal(result, expected)


@any_way
@each("shape, group_size", [((1, 8), 8), ((63, 80), 16), ((40, 129), 43)])
@each("dtype, tolerance", DTYPES)
@poisoned()
def test_a_gate_multiplies_before_or_after_the_norm_of_each_group(
    shape: tuple[int, int], group_size: int, dtype: torch.dtype, tolerance: float
) -> None:
    generator, (num_rows, channels) = torch.Generator().manual_seed(0), shape
    wide = (torch.randn(num_rows, 3 * channels + 1, generator=generator) * 3).to(dtype)
    x, gate = wide[:, :channels], wide[:, channels + 1 : 2 * channels + 1]
    gate[0, 0], weight = -100, torch.randn(channels, generator=generator).to(dtype)  # exp(100) is infinite in float32
    silu, factors = gate.double() * gate.double().sigmoid(), weight.double()
    for threads, gates_output in product((1, 3), (False, True)):
        set_threads(threads)
        z = (x.double() if gates_output else x.double() * silu).unflatten(1, (-1, group_size))
        expected = (z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * factors
        if gates_output:
            expected *= gate.double().sigmoid()
        result = gated_rms_norm(x, gate, weight, group_size, 1e-5, gates_output)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
        for row in range(0, num_rows, 7):  # the bits of a row depend only on that row
            part = slice(row, row + 1)
            assert gated_rms_norm(x[part], gate[part], weight, group_size, 1e-5, gates_output).equal(result[part])

"""fit_scales: equal bits in every way, and the least error of all scales of its kind."""

import torch
from torch import Tensor

from kernels import build
from kernels.fit_scales import fit_scales, reference
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def odd_weight(num_groups: int, size: int) -> Tensor:
    """Rows of magnitudes from 1e-8 to 1e4, of zeros, of equal numbers, of one sign, and of opposite extremes."""
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(40, num_groups * size, generator=generator) * torch.logspace(-8, 4, 40)[:, None]
    weight[20] = 0
    weight[21] = 0.3
    weight[22:24] = weight[22:24].abs() * torch.tensor([[1], [-1]])
    weight[24, ::2], weight[24, 1::2] = 2.5, -2.5
    return weight


@any_way
@each("is_symmetric", [True, False])
@each("size", [1, 8, 24, 32, 100])
@poisoned()
def test_has_the_bits_of_the_reference(size: int, is_symmetric: bool) -> None:
    weight = odd_weight(3, size)
    for dtype in DTYPES:
        for scale_dtype in DTYPES:
            arguments = weight.to(dtype), size, is_symmetric, scale_dtype
            scales, zero_points = fit_scales(*arguments)
            expected_scales, expected_zeros = reference.fit_scales(*arguments)
            assert scales.equal(expected_scales)
            assert (zero_points.dtype, zero_points.tolist()) == (torch.int8, expected_zeros.tolist())
            strided = weight.T.contiguous().T.to(dtype)
            assert fit_scales(strided, size, is_symmetric, scale_dtype)[0].equal(expected_scales)
    if library := build.library():
        large = odd_weight(300, size)
        expected = fit_scales(large, size, is_symmetric)
        library.set_threads(3)
        assert all(map(torch.equal, fit_scales(large, size, is_symmetric), expected))


@each("is_symmetric", [True, False])
def test_no_extreme_is_rounded_and_no_candidate_is_better(is_symmetric: bool) -> None:
    weight = torch.randn(50, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scales, zeros = fit_scales(weight.float(), 32, is_symmetric)
    wide = scales.double()
    zero = torch.full_like(wide, 8) if is_symmetric else zeros.double()
    extreme = weight.gather(1, weight.abs().argmax(1, keepdim=True))
    steps = extreme / wide
    # float32 rounds a scale by 2**-24 of its value
    torch.testing.assert_close(steps, steps.round(), rtol=1e-6, atol=0)
    error = squared_error(weight, wide, zero)
    for number in (7, -8) if is_symmetric else range(7, 16):
        scale = extreme / number if is_symmetric else extreme.abs() / number
        other = zero if is_symmetric else torch.where(extreme < 0, number, 15 - number)
        assert bool((error <= squared_error(weight, scale, other) * (1 + 1e-5)).all())  # sums of 32 float32 numbers


def squared_error(weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    codes = ((weight / scales).round() + zeros).clamp(0, 15)
    return ((codes - zeros) * scales - weight).square().sum(1, keepdim=True)

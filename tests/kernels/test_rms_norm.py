"""rms_norm against the formula in float64."""

from collections.abc import Callable

import pytest
import torch

from kernels.rms_norm import rms_norm


@pytest.mark.usefixtures("any_way", "poisoned")
@pytest.mark.parametrize("shape", [(1, 8), (63, 80), (1000, 129)], ids="T{0[0]}-D{0[1]}".format)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)  # two roundings of half an ulp
def test_equals_formula(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    mean = (x.double() ** 2).sum(-1, keepdim=True) / shape[1]
    expected = x.double() / (mean + 1e-5).sqrt() * weight.double()
    result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_eps_keeps_zeros_finite() -> None:
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6).tolist() == [[0.0] * 4] * 2


def test_a_row_is_the_same_to_the_bit_in_any_company(compiled: Callable[[int], None]) -> None:
    x, weight = torch.randn(300, 5, 99), torch.randn(99)  # as heads of queries
    alone = torch.stack([rms_norm(row[None], weight, 1e-5)[0] for row in x])
    for threads in range(1, 5):
        compiled(threads)
        assert torch.equal(rms_norm(x, weight, 1e-5), alone)

"""soft_cap compared with its formula in float64."""

import torch

from kernels.soft_cap import soft_cap
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]  # one rounding


@any_way
@each("shape", [(0, 5), (1, 1), (63, 129), (3, 9001)])
@each("dtype, tolerance", DTYPES)
@poisoned()
def test_equals_formula(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 40).to(dtype)
    capped = soft_cap(x, 30.0)
    assert capped.dtype == dtype
    expected = 30 * (x.double() / 30).tanh()
    torch.testing.assert_close(capped.double(), expected, rtol=tolerance * 1.01, atol=0)


@any_way
def test_every_part_of_the_line() -> None:
    x = torch.cat((torch.linspace(-1, 1, 10_001), torch.tensor([-torch.inf, -1e30, 1e30, torch.inf, torch.nan])))
    capped = soft_cap(x[None], 0.125)[0]
    torch.testing.assert_close(capped[:-5].double(), 0.125 * (x[:-5].double() / 0.125).tanh(), rtol=1e-6, atol=1e-9)
    assert capped[-5:-1].tolist() == [-0.125, -0.125, 0.125, 0.125]
    assert capped[-1].isnan()


@compiled
def test_to_the_bit_on_any_number_of_threads() -> None:
    x = torch.randn(40, 1001)
    alone = torch.cat([soft_cap(row, 2.0) for row in x.split(1)])
    for threads in range(1, 5):
        set_threads(threads)
        assert torch.equal(soft_cap(x, 2.0), alone)
        assert torch.equal(soft_cap(x.T, 2.0), alone.T)  # not contiguous

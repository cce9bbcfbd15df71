"""gelu and gelu_tanh compared with their formulas in float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.gelu import gelu, gelu_tanh
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]  # two roundings of half a unit
ABSOLUTE = 2e-6  # 1 + erf and 1 + tanh lose digits near -1


def exact(x: Tensor) -> Tensor:
    return x * (1 + (x * math.sqrt(0.5)).erf()) / 2


def exact_tanh(x: Tensor) -> Tensor:
    return x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2


@any_way
@each("shape", [(1, 7), (63, 129), (3, 9000)])
@each("dtype, tolerance", DTYPES)
@poisoned()
def test_equals_formula(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    x, up = (torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    near = {
        "rtol": tolerance,
        "atol": ABSOLUTE + tolerance / 16,
    }  # small float16 and bfloat16 numbers are denormal, or rounded twice
    torch.testing.assert_close(gelu(x).double(), exact(x.double()), **near)
    torch.testing.assert_close(gelu_tanh(x).double(), exact_tanh(x.double()), **near)
    active = gelu_tanh(x)
    assert active.dtype == dtype
    assert torch.equal(gelu_tanh(x, up), active * up)  # rounded before the product


@any_way
@each("form", [gelu, gelu_tanh])
def test_every_part_of_the_line(form: Callable[[Tensor], Tensor]) -> None:
    x = torch.cat((torch.linspace(-30, 30, 10_001), torch.tensor([-1e30, -1e4, 1e4, 1e30, torch.inf, torch.nan])))
    result = form(x[None])[0]
    expected = (exact if form is gelu else exact_tanh)(x[:-6].double())
    torch.testing.assert_close(result[:-6].double(), expected, rtol=1e-6, atol=ABSOLUTE)
    assert result[-6:-1].tolist() == [0, 0, 1e4, torch.tensor(1e30), torch.inf]
    assert result[-1].isnan()


@compiled
def test_halves_of_a_fused_product_to_the_bit_on_any_number_of_threads() -> None:
    gate, up = torch.randn(300, 2 * 1001).chunk(2, dim=-1)
    pairs = list(zip(gate.contiguous().split(1), up.contiguous().split(1), strict=True))
    gated, alone = (torch.cat([gelu_tanh(g, u) for g, u in pairs]), torch.cat([gelu(g) for g, _ in pairs]))
    for threads in range(1, 5):
        set_threads(threads)
        assert torch.equal(gelu_tanh(gate, up), gated)
        assert torch.equal(gelu_tanh(gate, up.contiguous()), gated)  # rows with another stride
        assert torch.equal(gelu(gate), alone)

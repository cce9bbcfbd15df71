"""swiglu and sigmoid_gate compared with the formulas in float64."""

import torch

from kernels.sigmoid_gate import sigmoid_gate
from kernels.swiglu import swiglu
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]  # two roundings of half a unit


@any_way
@each("shape", [(1, 7), (63, 129), (3, 9000)])
@each("dtype, tolerance", DTYPES)
@poisoned()
def test_equals_formula(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    gate, up = (torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(swiglu(gate, up).double(), expected, rtol=tolerance, atol=tolerance)
    for gates in (gate, gate[:, :1]):
        expected = up.double() * gates.double().sigmoid()
        torch.testing.assert_close(sigmoid_gate(up, gates).double(), expected, rtol=tolerance, atol=tolerance)


@any_way
def test_far_from_zero() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -80.0, 0.0, 80.0, 1e30, torch.inf, torch.nan]])
    result = swiglu(gate, torch.ones_like(gate))[0]
    assert result[:3].abs().max() < 1e-36
    assert result[4:8].tolist() == [0, 80, torch.tensor(1e30), torch.inf]
    torch.testing.assert_close(result[3].double(), torch.tensor(-80.0).double() * torch.tensor(-80.0).double().exp())
    assert result[8].isnan()
    sigmoids = sigmoid_gate(torch.ones_like(gate), gate)[0]
    assert sigmoids[:3].abs().max() < 1e-37
    assert sigmoids[4:8].tolist() == [0.5, 1, 1, 1]
    assert sigmoids[8].isnan()


@any_way
@poisoned()
def test_one_row_for_all_and_none() -> None:
    gate, up = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)), torch.arange(33.0)[None]
    # contiguous rows use another exp, off by 2 units of the last place
    torch.testing.assert_close(swiglu(gate, up), swiglu(gate, up.expand(5, 33)), rtol=1e-6, atol=0)
    assert swiglu(gate[:0], gate[:0]).shape == (0, 33)


@compiled
def test_halves_of_a_fused_product_to_the_bit_on_any_number_of_threads() -> None:
    fused = torch.randn(300, 2 * 1001)
    gate, up = fused.chunk(2, dim=-1)
    alone = torch.cat([swiglu(g[None], u[None]) for g, u in zip(gate.contiguous(), up.contiguous(), strict=True)])
    for threads in range(1, 5):
        set_threads(threads)
        assert torch.equal(swiglu(gate, up), alone)
        for gates in (gate, gate[:, :1]):
            parts = [sigmoid_gate(up[row : row + 1], gates[row : row + 1]) for row in range(len(up))]
            assert torch.equal(sigmoid_gate(up, gates), torch.cat(parts))

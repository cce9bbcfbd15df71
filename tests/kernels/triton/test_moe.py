"""All experts in two launches against one expert after the other, in float64; experts that nobody chose are NaN."""

import pytest
import torch

from kernels.moe import reference, route, triton
from tests.kernels.triton.cases import DEVICE, assert_near, noise


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("experts", [1, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantised", [False, True])
def test_equals_one_expert_after_the_other(tokens: int, experts: int, dtype: torch.dtype, quantised: bool) -> None:
    size, channels = 72, 40
    x = noise(tokens, size, dtype=dtype)
    weights, chosen = route(noise(tokens, experts, seed=1), min(2, experts), True)
    gate_up, down = noise(experts, 2 * channels, size, seed=2), noise(experts, size, channels, seed=3)
    scales: tuple[torch.Tensor, ...] = ()
    if quantised:
        scales = (gate_up.abs().amax(-1) / 127, down.abs().amax(-1) / 127)
        gate_up, down = (
            (m / s[..., None]).round().to(torch.int8) for m, s in zip((gate_up, down), scales, strict=True)
        )
    else:
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        idle = [number for number in range(experts) if number not in chosen]
        gate_up[idle], down[idle] = torch.nan, torch.nan
    exact = [part if quantised else part.double() for part in (gate_up, down)]
    expected = reference.mixture(x.double(), *exact, weights, chosen, *scales)
    moved = (part.to(DEVICE) for part in (x, gate_up, down, weights, chosen, *scales))
    # `hidden` is rounded to bfloat16, too
    assert_near(triton.mixture(*moved), expected)


def test_no_tokens() -> None:
    empty = torch.empty(0, 2)
    matrices = noise(3, 16, 8), noise(3, 8, 8)
    result = triton.mixture(
        noise(0, 8).to(DEVICE), *(m.to(DEVICE) for m in matrices), empty.to(DEVICE), empty.long().to(DEVICE)
    )
    assert result.shape == (0, 8)

"""rope compared with complex multiplication in float64."""

import torch

from kernels.rope import reference, rope, rope_angles
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way, compiled

NARROW = [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)]  # the reference rounds three times


@any_way
@each("head_dim", [2, 8, 80, 128])
@each("num_tokens", [1, 63])
@poisoned()
def test_equals_complex_rotation(head_dim: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 3, head_dim, generator=generator)
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator) * 100
    half = head_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(
        rope(x, angles.cos(), angles.sin()).double(), expected, rtol=0, atol=1e-5
    )  # cos in float32


@any_way
@poisoned()
def test_neighbours_may_be_the_pairs_and_channels_may_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 24, generator=generator)
    angles = torch.rand(7, 5, generator=generator) * 100  # 10 of the 24 channels are rotated
    pairs = torch.complex(x[..., 0:10:2].double(), x[..., 1:10:2].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    expected = torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 10:].double()), -1)
    result = rope(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)  # cos in float32
    assert result[..., 10:].equal(x[..., 10:])


@compiled
@each("interleaved", [False, True])
@each("dtype, tolerance", NARROW)
def test_heads_of_a_fused_product_turn_where_they_lie(dtype: torch.dtype, tolerance: float, interleaved: bool) -> None:
    fused = torch.randn(700, 7, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    angles = torch.rand(700, 12) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = reference.rope(fused, cos, sin, interleaved)
    for threads in range(1, 5):
        set_threads(threads)
        result = torch.cat([rope(part, cos, sin, interleaved) for part in (fused[:, :4], fused[:, 4:])], 1)
        torch.testing.assert_close(
            result, expected, rtol=tolerance, atol=4 * tolerance
        )  # differences of numbers up to 4
    assert rope(fused.transpose(1, 2), cos[:, :3], sin[:, :3]).shape == (700, 48, 7)


@any_way
@each("num_tokens", [1, 63])
@poisoned()
def test_angles_match_float64(num_tokens: int) -> None:
    positions = torch.arange(num_tokens) * 2003
    frequencies = 10000.0 ** (-torch.arange(40) / 40)
    exact = (
        positions[:, None].float() * frequencies
    ).double()  # an angle is rounded to float32, as in the models' own code
    for dtype, unit in ((torch.float32, 2**-24), (torch.bfloat16, 2**-9)):
        cos, sin = rope_angles(positions, frequencies, 1.25, dtype)
        for result, expected in ((cos, exact.cos()), (sin, exact.sin())):
            assert result.dtype == dtype
            # half a unit for each rounding: the function (1.5 units at most), the product, the dtype
            torch.testing.assert_close(result.double(), expected * 1.25, rtol=5 * unit, atol=1e-7)

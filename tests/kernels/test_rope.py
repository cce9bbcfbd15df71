"""rope against complex multiplication in float64."""

import pytest
import torch

from kernels.rope import rope


@pytest.mark.parametrize("head_dim", [2, 8, 80, 128])
@pytest.mark.parametrize("num_tokens", [1, 63])
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


def test_neighbours_may_be_the_pairs_and_channels_may_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 24, generator=generator)
    angles = torch.rand(7, 5, generator=generator) * 100  # 10 of the 24 channels turn
    pairs = torch.complex(x[..., 0:10:2].double(), x[..., 1:10:2].double())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]
    expected = torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 10:].double()), -1)
    result = rope(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)  # cos in float32
    assert result[..., 10:].equal(x[..., 10:])

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

"""The linear layer: what torch computes, and the same bits for a row in any number of rows."""

import pytest
import torch

from models.layers.linear import linear, linear_per_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 96), (64, 1), (40, 33), (80, 330), (256, 1536), (704, 256), (2048, 512)]
)
def test_a_row_is_the_same_in_any_number_of_rows(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    x = torch.randn(101, inputs, generator=generator).to(dtype)
    whole = linear(x, weight)
    for count in [*range(1, 40), 64, 65, 100]:
        assert torch.equal(linear(x[:count], weight), whole[:count]), count
        assert torch.equal(linear(x[-count:], weight), whole[-count:]), count
    torch.testing.assert_close(linear(x, weight, weight[:, 0]), torch.nn.functional.linear(x, weight, weight[:, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(4, 12, 24), (3, 24, 10), (16, 128, 512), (2, 512, 128)])
def test_a_row_of_every_head_is_the_same_in_any_number_of_rows(
    dtype: torch.dtype, heads: int, inputs: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(heads, outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    x = torch.randn(101, heads, inputs + 8, generator=generator).to(dtype)[..., :inputs]  # a part of each head
    whole = linear_per_head(x, weight)
    for count in [*range(1, 40), 64, 65, 100]:
        assert torch.equal(linear_per_head(x[:count], weight), whole[:count]), count
        assert torch.equal(linear_per_head(x[-count:], weight), whole[-count:]), count
    for head in range(heads):
        torch.testing.assert_close(whole[:, head], linear(x[:, head], weight[head]))

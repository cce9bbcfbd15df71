"""The linear layer: what torch computes, and the same bits for a row in any number of rows."""

import pytest
import torch

from models.layers.linear import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (40, 33), (80, 330), (256, 1536), (704, 256), (2048, 512)])
def test_a_row_is_the_same_in_any_number_of_rows(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    x = torch.randn(101, inputs, generator=generator).to(dtype)
    whole = linear(x, weight)
    for count in [*range(1, 40), 64, 65, 100]:
        assert torch.equal(linear(x[:count], weight), whole[:count]), count
        assert torch.equal(linear(x[-count:], weight), whole[-count:]), count
    assert torch.equal(linear(x, weight, weight[:, 0]), torch.nn.functional.linear(x, weight, weight[:, 0]))

"""take_channels compared with torch's index."""

import torch

from kernels.take_channels import take_channels
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way


@any_way
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("shape", [(0, 5), (3, 0), (1, 1), (63, 129), (3, 9001)])
@poisoned()
def test_equals_an_index(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, order = torch.randn(shape, generator=generator).to(dtype), torch.randperm(shape[1], generator=generator)
    assert take_channels(x, order).equal(x.index_select(1, order))
    some = order[: shape[1] // 2]
    assert take_channels(x, some).equal(x.index_select(1, some))
    apart = torch.cat((x, x), dim=1)[:, shape[1] :]  # rows with a stride
    assert take_channels(apart, order).equal(x.index_select(1, order))
    columns = x.T.contiguous().T  # channels with a stride
    assert take_channels(columns, order).equal(x.index_select(1, order))


@any_way
def test_keeps_every_bit() -> None:
    bits = torch.tensor(
        [[0x7FC1, 0xFF80, 0x8000, 0x0001]], dtype=torch.uint16
    )  # NaN with a payload, -inf, -0, a denormal
    taken = take_channels(bits.view(torch.bfloat16), torch.tensor([3, 1, 0, 2]))
    assert taken.view(torch.uint16).tolist() == [[0x0001, 0xFF80, 0x7FC1, 0x8000]]

"""The linear layer, whose every row is computed the same way however many rows there are."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# A CPU's matrix product takes other paths, which sum in another order, for fewer rows than these (measured with MKL and oneDNN on AVX2
# and AVX-512, every count from 1 to 80: float32 differs up to 11, bfloat16 at 1). Zero rows are added up to them.
MIN_ROWS = {torch.float32: 12, torch.bfloat16: 2, torch.float16: 2}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, I] times weight [O, I] transposed, plus bias [O]: [R, O]. On a CPU a row's bits do not depend on the other rows."""
    num_rows, least = x.shape[0], MIN_ROWS.get(x.dtype, 1)
    if num_rows >= least or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, least - num_rows)), weight, bias)[:num_rows]


def linear_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Every head's x [R, H, I] times its own weight [H, O, I] transposed: [R, H, O]. Rows as above."""
    num_rows, least = x.shape[0], MIN_ROWS.get(x.dtype, 1)
    if num_rows < least and x.device.type == "cpu":
        x = functional.pad(x, (0, 0, 0, 0, 0, least - num_rows))
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)[:num_rows]


class Linear(nn.Linear):
    output_axis = 0  # of the weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

"""M rows, K inputs, N outputs."""

import torch
from torch import Tensor
from torch.nn import functional

# A CPU's matrix product takes other paths, which sum in another order, for fewer rows than these (measured with MKL and oneDNN on AVX2
# and AVX-512, every count from 1 to 80: float32 differs up to 11, bfloat16 at 1). Zero rows are added up to them.
MIN_ROWS = {torch.float32: 12, torch.bfloat16: 2, torch.float16: 2}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]. On a CPU a row's bits do not depend on the other rows."""
    num_rows, least = x.shape[0], MIN_ROWS.get(x.dtype, 1)
    if weight.shape[0] == 1 and x.device.type == "cpu":
        # a product with a vector goes other ways again; a second output is added
        bias = None if bias is None else functional.pad(bias, (0, 1))
        return linear(x, functional.pad(weight, (0, 0, 0, 1)), bias)[:, :1]
    if num_rows >= least or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, least - num_rows)), weight, bias)[:num_rows]

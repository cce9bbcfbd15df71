"""T tokens, E hidden channels, F channels of an expert, N experts, K experts of each token."""

import torch
from torch import Tensor

from kernels.swiglu.reference import swiglu


def mixture(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts (arXiv 1701.06538): down(silu(gate(x)) * up(x)).

    x [T, E]; gate_up [N, 2F, E], the gate's rows first, and down [N, E, F] in x's dtype, or int8 with one float32 scale for each row,
    [N, 2F] and [N, E]; weights float32 and chosen int64, both [T, K], a token's experts all different. Returns [T, E] in x's dtype; the
    sum over experts is float32.
    """
    output = torch.zeros(x.shape, device=x.device)
    for number in range(len(gate_up)):
        tokens, ranks = (chosen == number).nonzero(as_tuple=True)
        hidden = x[tokens] @ _matrix(gate_up, gate_up_scales, number, x.dtype).T  # [*, 2F]
        result = swiglu(*hidden.chunk(2, dim=-1)) @ _matrix(down, down_scales, number, x.dtype).T
        output[tokens] += weights[tokens, ranks, None] * result.float()
    return output.to(x.dtype)


def _matrix(codes: Tensor, scales: Tensor | None, number: int, dtype: torch.dtype) -> Tensor:
    matrix = codes[number]
    return (matrix if scales is None else matrix * scales[number, :, None]).to(dtype)

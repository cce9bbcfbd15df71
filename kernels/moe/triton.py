"""Two launches for all experts: gate, up and activation in one, down in the other. Tokens are sorted by expert; a program takes some
tokens of one expert, so that what no token chose is not read (arXiv 2211.15841).

T tokens, E hidden channels, F channels of an expert, N experts, K experts of each token; P = T * K pairs of token and expert.

The weight stands on the left of a product, as in kernels/quant_matmul/triton.py. The grid depends on T alone; nothing waits for the GPU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.triton import find_segment
from kernels.swiglu.triton import silu


class Launch(NamedTuple):
    outputs: int
    pairs: int
    num_warps: int
    num_stages: int


LAUNCHES = {16: Launch(64, 16, 4, 4), 64: Launch(64, 64, 4, 3)}
"""By the number of pairs of an expert, if all have equally many, that it is for at most; more than the last have LARGE."""
LARGE = Launch(128, 128, 8, 3)
FLOAT32 = Launch(32, 16, 4, 2)


def mixture(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
) -> Tensor:
    """As kernels/moe/reference.py says, with float32 sums and scales applied to them."""
    x = x.contiguous()
    experts, channels = down.shape[0], down.shape[2]
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)  # [P]
    starts = torch.searchsorted(pairs[order], torch.arange(experts + 1, device=x.device))
    hidden = torch.empty(len(pairs), channels, dtype=x.dtype, device=x.device)  # sorted by expert
    parts = torch.empty(*chosen.shape, x.shape[1], dtype=torch.float32, device=x.device)
    if len(pairs):
        _launch(x, gate_up, gate_up_scales, order, starts, None, hidden, chosen.shape[1])
        _launch(hidden, down, down_scales, order, starts, weights.float().contiguous(), parts, chosen.shape[1])
    return parts.sum(1).to(x.dtype)


def _launch(
    x: Tensor,
    matrices: Tensor,
    scales: Tensor | None,
    order: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    output: Tensor,
    num_experts_per_tok: int,
) -> None:
    """The gated product if `weights` is None, else the weighted one."""
    experts, outputs = len(matrices), output.shape[-1]
    expected = triton.cdiv(len(order), experts)
    launch = next((launch for most, launch in LAUNCHES.items() if expected <= most), LARGE)
    launch = FLOAT32 if x.dtype == torch.float32 else launch
    blocks = len(order) // launch.pairs + experts  # at least as many as there are: each expert rounds up
    _product[(blocks, triton.cdiv(outputs, launch.outputs))](
        x,
        matrices,
        scales,
        order,
        starts,
        weights,
        output,
        experts=experts,
        outputs=outputs,
        inputs=x.shape[1],
        num_experts_per_tok=num_experts_per_tok,
        OUTPUTS=launch.outputs,
        PAIRS=launch.pairs,
        INPUTS=32 if x.dtype == torch.float32 else 64,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


@triton.jit
def _product(
    x,
    matrices,
    scales,
    order,
    starts,
    weights,
    output,
    experts: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    num_experts_per_tok: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """OUTPUTS outputs of PAIRS pairs of one expert. Without `weights`: silu(gate) * up of each pair's token, sorted by expert. With them:
    the weighted product of each pair, at its own place."""
    block = tl.program_id(0)
    expert = find_segment(starts, experts, block, PAIRS)
    start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    first = start + (block - (start // PAIRS + expert)) * PAIRS
    if first >= end:
        return
    m = first + tl.arange(0, PAIRS)
    inside = m < end
    pair = tl.load(order + m, mask=inside, other=0)
    GATED: tl.constexpr = weights is None
    rows = x + (pair // num_experts_per_tok if GATED else m)[:, None] * inputs
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = n < outputs
    height: tl.constexpr = 2 * outputs if GATED else outputs
    matrix = matrices + (expert.to(tl.int64) * height + n)[:, None] * inputs
    total = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    if GATED:
        total_up = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    for from_input in range(0, inputs, INPUTS):
        k = from_input + tl.arange(0, INPUTS)
        within = (k < inputs)[None, :]
        x_tile = tl.trans(tl.load(rows + k[None, :], mask=inside[:, None] & within, other=0.0))
        tile = tl.load(matrix + k[None, :], mask=known[:, None] & within, other=0.0).to(x_tile.dtype)
        total = tl.dot(tile, x_tile, total, input_precision="ieee")
        if GATED:
            tile = tl.load(matrix + outputs * inputs + k[None, :], mask=known[:, None] & within, other=0.0)
            total_up = tl.dot(tile.to(x_tile.dtype), x_tile, total_up, input_precision="ieee")
    if scales is not None:
        scale = scales + expert * height + n
        total *= tl.load(scale, mask=known, other=0.0)[:, None]
        if GATED:
            total_up *= tl.load(scale + outputs, mask=known, other=0.0)[:, None]
    if GATED:
        total = silu(total) * total_up
        place = m
    else:
        total *= tl.load(weights + pair, mask=inside, other=0.0)[None, :]
        place = pair
    tl.store(
        output + place[None, :] * outputs + n[:, None],
        total.to(output.dtype.element_ty),
        mask=known[:, None] & inside[None, :],
    )

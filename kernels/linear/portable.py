"""Products with packed weights in torch operators, for machines without the C++ kernels. M rows, K inputs, N outputs, G
groups."""

import torch
from torch import Tensor

from kernels.linear.block_weight import UNIT, BlockWeight
from kernels.linear.float8_weight import Float8Weight
from kernels.linear.float_weight import FloatWeight
from kernels.linear.int_weight import IntWeight
from kernels.linear.reference import dequantize, linear
from kernels.quantize_rows.rows import Activations, QuantizedActivations

# Bytes of weights that are dequantised at a time: few for a model, and enough to outweigh the overhead of a call.
BLOCK_BYTES = 2**25


def blocks(weight: IntWeight | BlockWeight) -> list[tuple[int, int]]:
    tiles = max(1, BLOCK_BYTES // (64 * weight.num_inputs))
    return [(first, min(first + tiles, weight.num_tiles)) for first in range(0, weight.num_tiles, tiles)]


def matmul(x: Activations, weight: FloatWeight | IntWeight | Float8Weight | BlockWeight, bias: Tensor | None) -> Tensor:
    """Return x [M, K] times weight transposed, plus bias [N]: [M, N] in x's dtype. Integer weights are unpacked a block
    of outputs at a time."""
    if isinstance(weight, FloatWeight):
        assert isinstance(x, Tensor)
        return linear(x, weight.unpack(), bias)
    if isinstance(weight, Float8Weight):
        y = _float8_matmul(x, weight)
        return y if bias is None else y + bias
    if isinstance(weight, BlockWeight):
        y = _block_matmul(x, weight)
        return y if bias is None else y + bias
    y = _int8_matmul(x, weight) if isinstance(x, QuantizedActivations) else _int_matmul(x, weight)
    return y if bias is None else y + bias


def take_rows(
    weight: FloatWeight | IntWeight | Float8Weight | BlockWeight, numbers: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows `numbers` int64 [M] of the weight, [M, K] in `dtype`. The whole weight is unpacked."""
    rows = _unpacked(weight)[numbers.clamp(0, weight.num_outputs - 1)].to(dtype)
    is_outside = (numbers < 0) | (numbers >= weight.num_outputs)
    return rows.masked_fill_(is_outside[:, None], torch.nan)


def _unpacked(weight: FloatWeight | IntWeight | Float8Weight | BlockWeight) -> Tensor:
    """Return the weight [N, K] in its own float dtype, or in float32."""
    if isinstance(weight, FloatWeight):
        return weight.unpack()
    if isinstance(weight, BlockWeight):
        return weight.unpack().dequantize()
    if isinstance(weight, IntWeight):
        return dequantize(*weight.unpack(), weight.group_size)
    codes, scales = weight.unpack()
    return codes.float() * scales.repeat_interleave(weight.group_size, 1)


def _int_matmul(x: Tensor, weight: IntWeight) -> Tensor:
    parts = [linear(x.float(), dequantize(*weight.unpack_tiles(*block), weight.group_size)) for block in blocks(weight)]
    return torch.cat(parts, dim=1).to(x.dtype)


def _block_matmul(x: Activations, weight: BlockWeight) -> Tensor:
    rows = x.codes.float() * x.scales.repeat_interleave(UNIT, 1) if isinstance(x, QuantizedActivations) else x.float()
    parts = [linear(rows, weight.unpack_tiles(*block).dequantize()) for block in blocks(weight)]
    return torch.cat(parts, dim=1).to(x.dtype)


def _int8_matmul(x: QuantizedActivations, weight: IntWeight) -> Tensor:
    """Sum integers exactly within a group, add the groups in float32 in order, and multiply by the scales of x."""
    parts = []
    for block in blocks(weight):
        codes, scales, zeros = weight.unpack_tiles(*block)
        total = torch.zeros(len(x), len(codes), device=x.codes.device)
        for group in range(weight.num_groups):
            inputs = slice(group * weight.group_size, (group + 1) * weight.group_size)
            centred = codes[:, inputs] if zeros is None else codes[:, inputs] - zeros[:, group, None]
            total += exact_product(x.codes[:, inputs], centred).float() * scales[:, group]
        parts.append(total)
    return (torch.cat(parts, dim=1) * x.scales).to(x.dtype)


def _float8_matmul(x: Activations, weight: Float8Weight) -> Tensor:
    """Sum products of codes and inputs within a group, scale the sum, and add the groups in float32 in order."""
    codes, scales = weight.unpack()
    inputs, size = x.codes if isinstance(x, QuantizedActivations) else x, weight.group_size
    total = torch.zeros(len(x), len(codes), device=codes.device)
    for group, start in enumerate(range(0, weight.num_inputs, size)):
        part = slice(start, start + size)
        products = linear(inputs[:, part].float(), codes[:, part].float())
        scale = scales[:, group]  # [N]
        total += products * (scale * _row_scales(x, start) if isinstance(x, QuantizedActivations) else scale)
    return total.to(x.dtype)


def _row_scales(x: QuantizedActivations, first_input: int) -> Tensor:
    """Return the scales [M, 1] or [1, 1] of the group that contains `first_input`."""
    group = first_input // x.group_size if x.scales.shape[1] > 1 and x.group_size else 0
    return x.scales[:, group, None]


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a int8 [M, K] times b int8 [N, K] transposed: [M, N] integers in float64.

    torch._int_mm is not used: on a CPU without VNNI it saturates at 16 bits (huggingface/optimum-quanto#309), and one
    row or column may be wrong (pytorch/pytorch#195066). The sum of 1024 products of int8 is exact in float32, in any
    order.
    """
    pieces = zip(a.split(1024, dim=1), b.split(1024, dim=1), strict=True)
    return sum(
        (linear(x.float(), y.float()).double() for x, y in pieces),
        torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device),
    )

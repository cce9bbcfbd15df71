"""Products of linear layers: rows of activations times a packed weight, a plain weight, a float8 weight, or a weight in
the GPU's layout.

M rows, K inputs, N outputs. With the C++ kernels the bits of a row do not depend on the other rows or on the number of
threads. Without them torch multiplies, and the order of its sums may depend on the number of rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import float8_weight, gpu_weight, int_weight
from kernels.linear.block_weight import BlockWeight, pack_blocks
from kernels.linear.float8_weight import Float8Weight
from kernels.linear.float_weight import FloatWeight, pack
from kernels.linear.gpu_weight import GPUWeight
from kernels.linear.int_weight import IntWeight, known_group_size
from kernels.linear.packed import (
    MAX_TOGETHER,
    PackedWeight,
    WeightGroup,
    grouped_matmul,
    matmul_per_head,
    matmul_swiglu,
    matmul_together,
    take_rows,
)
from kernels.linear.plain import linear, linear_per_head
from kernels.quantize_rows import Activations

__all__ = [
    "MAX_TOGETHER",
    "BlockWeight",
    "Float8Weight",
    "FloatWeight",
    "GPUWeight",
    "IntWeight",
    "PackedWeight",
    "WeightGroup",
    "grouped_matmul",
    "linear",
    "linear_per_head",
    "lookup",
    "matmul",
    "matmul_per_head",
    "matmul_swiglu",
    "matmul_together",
    "pack",
    "pack_blocks",
    "pack_codes",
    "pack_float8",
    "take_rows",
]


def matmul(x: Activations, weight: PackedWeight | GPUWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight transposed, plus bias [N]: [M, N] in x's dtype.

    Rows of float32, bfloat16 or float16 can be multiplied by weights of any format; a FloatWeight requires rows of its
    dtype. Sums are float32, rounded once.

    - IntWeight: the C++ kernels quantise the row to 16 bits, with a scale per 128 inputs (or per group, if that is
      smaller). The error of an input is at most 2^-16 of the largest input under the same scale. Everything else is
      exact up to float32 sums. A row with NaN or infinity gives NaN or infinity.
    - BlockWeight: like IntWeight, with one scale of the row per group of the weight. Rows of int8 have a scale per 32
      inputs.
    - Float8Weight: codes, which are exact in bfloat16, are multiplied by the inputs. The sum of each group is scaled,
      then the groups are added in order.

    Rows of int8 require an IntWeight or a BlockWeight; sums within a group are exact. Rows of float8_e4m3fn require a
    Float8Weight; the rows may be quantised in groups if the weight is, and each of their groups covers one or more
    whole groups of the weight.

    Raises ValueError if shapes or dtypes do not match.
    """
    if not isinstance(weight, GPUWeight):
        return matmul_together(x, [weight], [bias])[0]
    from kernels.linear import triton  # not at the top: a process without a GPU does not load Triton

    y = triton.matmul(x, weight)
    return y if bias is None else y + bias


def lookup(weight: Tensor | PackedWeight | GPUWeight, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `numbers` int64 [M] of a weight [N, K], as an embedding does: [M, K] in `dtype`.

    A weight in floats has this dtype. Values of other weights are float32, rounded once.
    """
    if isinstance(weight, Tensor):
        return functional.embedding(numbers, weight)
    if isinstance(weight, GPUWeight):
        return gpu_weight.take_rows(weight, numbers, dtype)
    return take_rows(weight, numbers, dtype)


def pack_codes(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> IntWeight | GPUWeight:
    """Pack int8 codes [N, K] for the kernels of their device. Arguments and errors are the same as of
    `int_weight.pack`."""
    if _on_gpu(codes):
        return gpu_weight.pack(codes, scales, zero_points, bits)
    return int_weight.pack(codes, scales, zero_points, bits)


def pack_float8(codes: Tensor, scales: Tensor) -> Float8Weight | GPUWeight:
    """Pack codes float8_e4m3fn [N, K] and scales float32 [N, G] of equal groups, or [1, 1] for the whole weight.

    The GPU kernels support groups of 32, 64, 128 or all inputs; for other sizes torch multiplies. Raises ValueError for
    other dtypes or shapes.
    """
    if _on_gpu(codes) and known_group_size(codes.shape[1], scales.shape[1]) is not None:
        return gpu_weight.pack(codes, scales, None, 8)
    return float8_weight.pack(codes, scales)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda

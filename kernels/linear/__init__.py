"""Linear layers' products: rows of activations times a weight that is packed, plain, of float8, or in the form that a GPU reads.

M rows, K inputs, N outputs. With the C++ kernels a row's result does not depend on the other rows or on the number of threads, to the bit.
Without them torch multiplies, and the order of its sums may depend on the number of rows.
"""

from torch import Tensor

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
)
from kernels.linear.plain import linear, linear_per_head
from kernels.quantize_rows import Rows

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
    "matmul",
    "matmul_per_head",
    "matmul_swiglu",
    "matmul_together",
    "pack",
    "pack_blocks",
    "pack_codes",
    "pack_float8",
]


def matmul(x: Rows, weight: PackedWeight | GPUWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight transposed, plus bias [N]: [M, N] in x's dtype.

    Rows of float32, bfloat16 or float16 are multiplied by weights of any format, those of a FloatWeight of its dtype. Sums are float32,
    rounded once.

    - An IntWeight: with the C++ kernels, 128 inputs of a row (or a group, if that is less) share a scale and have 16 bits. Each is off by
      at most 2^-16 of the largest of them, and everything else is exact up to float32 sums. A row with NaN or infinity gives such.
    - A BlockWeight: as an IntWeight, with a scale of the row for each group of the weight. There are no products with rows of int8.
    - A Float8Weight: codes, exact in bfloat16, are multiplied by the inputs. The sum of a group is scaled, then groups are
      added in their order.

    Rows of int8 are multiplied by weights of integers, whose sums of a group are exact, those of float8_e4m3fn by weights of float8. Beside
    a float8 weight with groups the rows may have groups too, each of one or several whole ones of the weight's.

    Raises ValueError if shapes or dtypes do not belong together.
    """
    if not isinstance(weight, GPUWeight):
        return matmul_together(x, [weight], [bias])[0]
    from kernels.linear import triton  # not at the top: a process without a GPU need not load it

    y = triton.matmul(x, weight)
    return y if bias is None else y + bias


def pack_codes(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> IntWeight | GPUWeight:
    """Pack int8 codes [N, K] for the kernels of their device, with the arguments and errors of `int_weight.pack`."""
    if _on_gpu(codes):
        return gpu_weight.pack(codes, scales, zero_points, bits)
    return int_weight.pack(codes, scales, zero_points, bits)


def pack_float8(codes: Tensor, scales: Tensor) -> Float8Weight | GPUWeight:
    """Pack codes float8_e4m3fn [N, K] and scales float32 [N, G], of groups of one size, or [1, 1] for the whole weight.

    A GPU has no kernels for groups of other than 32, 64, 128 or all inputs: there torch multiplies. Raises ValueError for other dtypes or
    shapes.
    """
    if _on_gpu(codes) and known_group_size(codes.shape[1], scales.shape[1]) is not None:
        return gpu_weight.pack(codes, scales, None, 8)
    return float8_weight.pack(codes, scales)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda

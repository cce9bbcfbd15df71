"""Matrix product with a weight of float32 or bfloat16.

M rows, K inputs, N outputs. A row's result does not depend on the other rows or on the number of threads, to the bit.
"""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.matmul.packed import PackedMatrix, pack
from kernels.matmul.reference import linear

__all__ = ["PackedMatrix", "linear", "matmul", "pack"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.matmul.argtypes = (c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64)
    library.matmul.restype = None
    return library


def matmul(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """x [M, K] times weight transposed, plus bias [N]: [M, N]. All have the weight's dtype; sums are float32, rounded once.

    Raises ValueError if shapes or dtypes do not belong together.
    """
    library = build.library()
    if x.ndim != 2 or x.shape[1] != weight.num_inputs or x.dtype != weight.tiles.dtype:
        raise ValueError(
            f"rows {list(x.shape)} of {x.dtype} and a weight of {weight.num_inputs} inputs of {weight.tiles.dtype}"
        )
    if bias is not None and (bias.shape != (weight.num_outputs,) or bias.dtype != x.dtype):
        raise ValueError(f"a bias {list(bias.shape)} of {bias.dtype} for {weight.num_outputs} outputs of {x.dtype}")
    if library is None:
        return linear(x, weight.unpack(), bias)
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype)
    _declared(library).matmul(
        x.data_ptr(),
        build.DTYPES[x.dtype],
        weight.tiles.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.num_inputs,
        weight.num_outputs,
    )
    return out

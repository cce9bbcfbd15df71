"""What a mixture of experts adds to its experts: a choice, rows grouped by expert, the weighted sum; on a GPU the experts too."""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.moe import reference
from kernels.quant_matmul.gpu_weight import GPUWeight
from kernels.quantize_rows import RowCodes

__all__ = ["combine_rows", "group_rows", "mixture", "route"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.route.argtypes = (c_void_p, c_int32, c_void_p, c_void_p) + (c_int64,) * 3 + (c_int32,)
    library.group_rows.argtypes = (c_void_p,) * 5 + (c_int64,) * 4
    library.combine_rows.argtypes = (c_void_p, c_int32, c_void_p, c_void_p, c_void_p) + (c_int64,) * 3
    library.route.restype = library.group_rows.restype = library.combine_rows.restype = None
    return library


def route(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See kernels/moe/reference.py. Raises ValueError unless 1 <= K <= N."""
    num_tokens, num_experts = logits.shape
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"{num_chosen} of {num_experts} experts cannot be chosen: at least 1, at most all")
    library, dtype = build.library(), build.DTYPES.get(logits.dtype)
    if logits.is_cuda and dtype is not None:
        from kernels.moe import triton  # not at the top: a process without a GPU need not load it

        return triton.route(logits, num_chosen, renormalise)
    if library is None or dtype is None or not logits.is_cpu:
        return reference.route(logits, num_chosen, renormalise)
    logits = logits.contiguous()
    weights = torch.empty(num_tokens, num_chosen)
    chosen = torch.empty(num_tokens, num_chosen, dtype=torch.int64)
    _declared(library).route(
        *(logits.data_ptr(), dtype, weights.data_ptr(), chosen.data_ptr()),
        *(num_tokens, num_chosen, num_experts, renormalise),
    )
    return weights, chosen


def group_rows(x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/moe/reference.py."""
    library = build.library()
    if library is None or not x.is_cpu or chosen.dtype != torch.int64 or len(chosen) != len(x):
        return reference.group_rows(x, chosen, num_experts)
    x, chosen = x.contiguous(), chosen.contiguous()
    num_tokens, num_chosen = chosen.shape
    rows = torch.empty(num_tokens * num_chosen, x.shape[1], dtype=x.dtype)
    starts, places = torch.empty(num_experts + 1, dtype=torch.int64), torch.empty_like(chosen)
    _declared(library).group_rows(
        *(x.data_ptr(), chosen.data_ptr(), rows.data_ptr(), places.data_ptr(), starts.data_ptr()),
        *(num_tokens, num_chosen, num_experts, x.shape[1] * x.itemsize),
    )
    return rows, starts, places


def combine_rows(parts: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """See kernels/moe/reference.py."""
    library, dtype = build.library(), build.DTYPES.get(parts.dtype)
    are_known = (weights.dtype, places.dtype) == (torch.float32, torch.int64) and weights.shape == places.shape
    if library is None or dtype is None or not parts.is_cpu or not are_known:
        return reference.combine_rows(parts, weights, places)
    parts, weights, places = parts.contiguous(), weights.contiguous(), places.contiguous()
    out = torch.empty(len(places), parts.shape[1], dtype=parts.dtype)
    _declared(library).combine_rows(
        *(parts.data_ptr(), dtype, weights.data_ptr(), places.data_ptr(), out.data_ptr()), *places.shape, parts.shape[1]
    )
    return out


def mixture(
    x: Tensor,
    gate_up: GPUWeight,
    down: GPUWeight,
    weights: Tensor,
    chosen: Tensor,
    gate_up_rows: RowCodes | None = None,
    down_rows: RowCodes | None = None,
) -> Tensor:
    """See kernels/moe/reference.py. The weights, floats or quantised, are the values there; on a GPU alone, which nothing waits for."""
    from kernels.moe import triton

    return triton.mixture(x, gate_up, down, weights, chosen, gate_up_rows, down_rows)

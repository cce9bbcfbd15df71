"""Products with a weight that is used once, or that other code reads as well. The weight stays unpacked, and every call
packs it in parts.

M rows, K inputs, N outputs, H heads. With the C++ kernels the result is bit-identical to a product with the packed
weight.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.linear import reference
from kernels.operator import UnsupportedArguments, operator


def _empty(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-2])


@operator(reference.linear, fake=_empty)
def linear(cpp: Library, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N]."""
    if x.ndim != 2 or not _fit(x, weight, bias):
        raise UnsupportedArguments
    return _multiply(cpp, x[None], weight[None], bias)[0]


@operator(reference.linear_per_head, fake=_empty)
def linear_per_head(cpp: Library, x: Tensor, weight: Tensor) -> Tensor:
    """Return every head's x [M, H, K] times its own weight [H, N, K] transposed: [M, H, N], each product as `linear`
    computes it."""
    if x.ndim != 3 or not _fit(x, weight, None):
        raise UnsupportedArguments
    return _multiply(cpp, x.transpose(0, 1), weight, None).transpose(0, 1)


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether C++ supports the arguments. If shapes or dtypes do not match, torch computes and raises the error."""
    are_cpu = x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)
    if not are_cpu or x.dtype not in DTYPES:
        return False
    heads = x.shape[1:-1]  # [H], or []
    return (
        weight.shape == (*heads, weight.shape[-2], x.shape[-1])
        and weight.dtype == x.dtype
        and (bias is None or (bias.shape, bias.dtype) == (weight.shape[:1], x.dtype))
    )


def _multiply(cpp: Library, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [H, M, K] by weight [H, N, K]: [H, M, N]."""
    if 1 not in weight.stride()[1:]:
        weight = weight.contiguous()
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(*x.shape[:2], weight.shape[1], dtype=x.dtype)
    cpp.linear(
        x.data_ptr(),
        DTYPES[x.dtype],
        *x.shape,
        weight.data_ptr(),
        *weight.stride(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        weight.shape[1],
    )
    return out

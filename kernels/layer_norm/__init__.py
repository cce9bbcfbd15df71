"""Layer normalisation.

T tokens, D channels.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.layer_norm import reference
from kernels.operator import UnsupportedArguments, operator
from kernels.quantize_rows import CodesArguments, code_arguments

__all__ = ["layer_norm", "layer_norm_quantize"]


@operator(reference.layer_norm, has_triton=True)
def layer_norm(cpp: Library, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the norm of x [T, D], as `reference.layer_norm` does. The bits of a row depend only on that row."""
    _check(x, weight, bias)
    out = torch.empty(*x.shape, dtype=x.dtype)
    _normalise(cpp, x, weight, bias, eps, out, (None, None, False, 0, None, 0))
    return out


@operator(reference.layer_norm_quantize, has_triton=True)
def layer_norm_quantize(
    cpp: Library,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm as codes and scales. On a CPU it is bit-identical to `quantize_rows` of `layer_norm`."""
    _check(x, weight, bias)
    codes, scales, arguments = code_arguments(x, dtype, group_size, static_scales)
    _normalise(cpp, x, weight, bias, eps, None, arguments)
    return codes, scales


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    vectors = [vector for vector in (weight, bias) if vector is not None]
    if (
        x.dtype not in DTYPES
        or not x.is_cpu
        or any((y.shape, y.dtype, y.is_cpu) != (x.shape[-1:], x.dtype, True) for y in vectors)
    ):
        raise UnsupportedArguments


def _normalise(
    cpp: Library,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
    codes: CodesArguments,
) -> None:
    x, factors, addends = x.contiguous(), *(None if y is None else y.contiguous() for y in (weight, bias))
    pointers = (None if y is None else y.data_ptr() for y in (x, factors, addends, out))
    cpp.layer_norm(*pointers, *codes, DTYPES[x.dtype], x.shape[:-1].numel(), x.shape[-1], eps)

"""Root mean square normalisation.

T tokens, D channels.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.quantize_rows import CodesArguments, code_arguments
from kernels.rms_norm import reference

__all__ = ["add_rms_norm", "add_rms_norm_quantize", "rms_norm", "rms_norm_quantize"]


@operator(reference.rms_norm, has_triton=True)
def rms_norm(cpp: Library, x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    """Return the norm of x [T, D], as `reference.rms_norm` does. The bits of a row depend only on that row."""
    if not _fit(x, weight):
        raise UnsupportedArguments
    out = torch.empty(*x.shape, dtype=x.dtype)
    _normalise(cpp, x, None, weight, eps, weight_offset, out=out)
    return out


@operator(reference.add_rms_norm, has_triton=True)
def add_rms_norm(
    cpp: Library, x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum; bit-identical to `rms_norm` of torch's sum. The bits of a row
    depend only on that row of x and residual."""
    if not _fit(x, weight, residual):
        raise UnsupportedArguments
    out, total = (torch.empty(*x.shape, dtype=x.dtype) for _ in range(2))
    _normalise(cpp, x, residual, weight, eps, weight_offset, out=out, total=total)
    return out, total


@operator(reference.rms_norm_quantize, has_triton=True)
def rms_norm_quantize(
    cpp: Library,
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm as codes and scales. On a CPU it is bit-identical to `quantize_rows` of `rms_norm`."""
    if not _fit(x, weight):
        raise UnsupportedArguments
    codes, scales, arguments = code_arguments(x, dtype, group_size, static_scales)
    _normalise(cpp, x, None, weight, eps, weight_offset, codes=arguments)
    return codes, scales


@operator(reference.add_rms_norm_quantize, has_triton=True)
def add_rms_norm_quantize(
    cpp: Library,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group_size: int | None,
    static_scales: Tensor | None = None,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x + residual as codes and scales, and the sum. On a CPU it is bit-identical to `quantize_rows`
    of `add_rms_norm`."""
    if not _fit(x, weight, residual):
        raise UnsupportedArguments
    total = torch.empty(x.shape, dtype=x.dtype)
    codes, scales, arguments = code_arguments(x, dtype, group_size, static_scales)
    _normalise(cpp, x, residual, weight, eps, weight_offset, total=total, codes=arguments)
    return codes, scales, total


def _fit(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    fits = x.dtype in DTYPES and weight.dtype == x.dtype and x.is_cpu and weight.is_cpu and weight.shape == x.shape[-1:]
    return fits and (residual is None or (residual.dtype, residual.shape, residual.is_cpu) == (x.dtype, x.shape, True))


def _normalise(
    cpp: Library,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float | None = None,
    *,
    out: Tensor | None = None,
    total: Tensor | None = None,
    codes: CodesArguments = (None, None, False, 0, None, 0),
) -> None:
    x, weight, residual = x.contiguous(), weight.contiguous(), None if residual is None else residual.contiguous()
    tensors, channels = (x, residual, weight, out, total), x.shape[-1]
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    offset = (False, 0.0) if weight_offset is None else (True, weight_offset)
    cpp.rms_norm(*pointers, *codes, DTYPES[x.dtype], x.shape[:-1].numel(), channels, eps, *offset)

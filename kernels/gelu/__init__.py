"""GELU of a feed-forward layer, exact and with tanh.

T tokens, F channels.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.gelu import reference
from kernels.operator import UnsupportedArguments, operator

__all__ = ["gelu", "gelu_tanh"]


@operator(reference.gelu, has_triton=True)
def gelu(cpp: Library, x: Tensor) -> Tensor:
    """Return x Phi(x), as `reference.gelu` does. The bits of an element do not depend on its index."""
    return _activate(cpp, x, None, is_tanh=False)


@operator(reference.gelu_tanh, has_triton=True)
def gelu_tanh(cpp: Library, x: Tensor, up: Tensor | None = None) -> Tensor:
    """Return GELU's approximation by tanh, times `up` if given, as `reference.gelu_tanh` does. Rows need not be
    contiguous."""
    return _activate(cpp, x, up, is_tanh=True)


def _activate(cpp: Library, x: Tensor, up: Tensor | None, is_tanh: bool) -> Tensor:
    dtype = DTYPES.get(x.dtype)
    alike = up is None or (up.is_cpu and up.shape == x.shape and up.dtype == x.dtype)
    if dtype is None or x.ndim != 2 or not x.is_cpu or not alike:
        raise UnsupportedArguments
    x = x if x.stride(1) == 1 else x.contiguous()
    up = up if up is None or up.stride(1) == 1 else up.contiguous()
    out = torch.empty(*x.shape, dtype=x.dtype)
    up_at = (None, 0) if up is None else (up.data_ptr(), up.stride(0))
    cpp.gelu(x.data_ptr(), x.stride(0), *up_at, out.data_ptr(), dtype, *x.shape, is_tanh)
    return out

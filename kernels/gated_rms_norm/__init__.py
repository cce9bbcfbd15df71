"""The gated root mean square norms of Mamba-2 and of Kimi Delta Attention.

T tokens, C channels.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.gated_rms_norm import reference
from kernels.operator import UnsupportedArguments, operator

__all__ = ["gated_rms_norm"]


@operator(reference.gated_rms_norm, has_triton=True)
def gated_rms_norm(
    cpp: Library, x: Tensor, gate: Tensor, weight: Tensor, group_size: int, eps: float, gates_output: bool = False
) -> Tensor:
    """Return the same as `reference.gated_rms_norm`. The bits of a row depend only on that row. Rows need not be
    contiguous, for example a part of a fused matrix's outputs."""
    alike = all(part.is_cpu and part.dtype == x.dtype for part in (x, gate, weight)) and x.dtype in DTYPES
    fit = alike and x.ndim == 2 and gate.shape == x.shape and weight.shape == x.shape[1:]
    if not fit or group_size < 1 or x.shape[1] % group_size:
        raise UnsupportedArguments
    x, gate = (part if part.stride(1) == 1 else part.contiguous() for part in (x, gate))
    weight, out = weight.contiguous(), torch.empty(*x.shape, dtype=x.dtype)
    pointers = (part.data_ptr() for part in (x, gate, weight, out))
    cpp.gated_rms_norm(*pointers, DTYPES[x.dtype], *x.shape, x.stride(0), gate.stride(0), group_size, eps, gates_output)
    return out

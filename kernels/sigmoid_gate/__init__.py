"""The sigmoid gate of attention and of shared experts.

T tokens, C channels.
"""

import torch
from torch import Tensor

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.operator import UnsupportedArguments, operator
from kernels.sigmoid_gate import reference

__all__ = ["sigmoid_gate"]


@operator(reference.sigmoid_gate, has_triton=True)
def sigmoid_gate(cpp: Library, x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), as `reference.sigmoid_gate` does. The bits of a row depend only on that row."""
    alike = all(part.is_cpu and part.dtype == x.dtype for part in (x, gate)) and x.dtype in DTYPES
    if not alike or x.ndim != 2 or gate.shape not in (x.shape, (len(x), 1)):
        raise UnsupportedArguments
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    cpp.sigmoid_gate(x.data_ptr(), gate.data_ptr(), out.data_ptr(), DTYPES[x.dtype], *x.shape, gate.shape[1])
    return out

"""Bans tokens by a bitmask. R rows, V tokens in the vocabulary."""

from torch import Tensor, int32

from kernels.build import Library
from kernels.dtypes import DTYPES
from kernels.mask_logits import reference
from kernels.operator import UnsupportedArguments, operator

__all__ = ["mask_logits"]


def _check(logits: Tensor, bitmask: Tensor) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits are rows of floats, not {list(logits.shape)} of {logits.dtype}")
    shape = (len(logits), reference.num_words(logits.shape[1]))
    if bitmask.shape != shape or bitmask.dtype != int32:
        raise ValueError(f"a bitmask is {list(shape)} of int32, not {list(bitmask.shape)} of {bitmask.dtype}")


@operator(reference.mask_logits, fake=lambda *_: None, check=_check, has_triton=True, mutates_args=("logits",))
def mask_logits(cpp: Library, logits: Tensor, bitmask: Tensor) -> None:
    """Set logits [R, V] to -inf where the bitmask int32 [R, ceil(V / 32)] has a 0, as `reference.mask_logits` does.
    Rows need not be contiguous.

    Raises ValueError for other shapes and dtypes.
    """
    dtype = DTYPES.get(logits.dtype)
    if dtype is None or not logits.is_cpu or logits.stride(1) != 1:
        raise UnsupportedArguments
    bitmask = bitmask.contiguous()
    cpp.mask_logits(logits.data_ptr(), dtype, bitmask.data_ptr(), *logits.shape, logits.stride(0))
    return

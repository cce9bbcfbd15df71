"""From logits to tokens: the most likely one, or one that is drawn without sorting the vocabulary. R rows, V tokens in the vocabulary."""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kernels import build
from kernels.sampling import reference

__all__ = ["draw", "most_likely"]


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.draw.argtypes, library.draw.restype = (c_void_p, c_void_p, c_void_p, c_int64, c_int64), None
    library.most_likely.argtypes, library.most_likely.restype = (c_void_p, c_int32, c_void_p, c_int64, c_int64), None
    return library


def most_likely(logits: Tensor) -> Tensor:
    """The token int64 [R] of each row's highest logit [R, V], the lowest of equals. None may be NaN.

    16 rows of 32,000 bfloat16: 119 us; torch takes 490 for the same.
    """
    library, dtype = build.library(), build.DTYPES.get(logits.dtype)
    if library is None or dtype is None or not logits.is_cpu:
        return logits.float().argmax(-1)
    logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    _declared(library).most_likely(logits.data_ptr(), dtype, tokens.data_ptr(), *logits.shape)
    return tokens


def draw(logits: Tensor, settings: Tensor) -> Tensor:
    """What `reference.draw` says, on a CPU to the token. Raises ValueError for shapes and dtypes that it does not know."""
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits are rows of float32, not {list(logits.shape)} of {logits.dtype}")
    if settings.shape != (len(logits), 5) or settings.dtype != torch.float64:
        raise ValueError(f"settings are {[len(logits), 5]} of float64, not {list(settings.shape)} of {settings.dtype}")
    if logits.is_cuda:
        from kernels.sampling import triton

        return triton.draw(logits, settings)
    library = build.library()
    if library is None:
        return reference.draw(logits, settings)
    logits, settings = logits.contiguous(), settings.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    _declared(library).draw(logits.data_ptr(), settings.data_ptr(), tokens.data_ptr(), *logits.shape)
    undecided = tokens < 0
    if undecided.any():  # sums in another order cannot tell: next to never
        tokens[undecided] = reference.draw(logits[undecided], settings[undecided])
    return tokens

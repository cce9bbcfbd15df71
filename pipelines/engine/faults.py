"""Decides whether an exception belongs to one request, whose row fails alone, or to everything that runs."""

import logging

import torch

from conf.errors import UserError

log = logging.getLogger(__name__)

SHARED = (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError)  # memory, disk, pipe, device
CPU_MEMORY_ENDED = "DefaultCPUAllocator: can't allocate memory"  # in a RuntimeError, because torch has no class for it


def not_finite() -> UserError:
    """Return the error of a row whose logits are not finite."""
    remedy = "the weights are damaged, or model.dtype=float16 is too small for them: try model.dtype=float32"
    return UserError(f"the model's logits are not finite: {remedy}")


def belongs_to_request(error: BaseException) -> bool:
    """Return whether an exception belongs to one request alone.

    An interrupt, which is not a subclass of `Exception`, does not. A panic in a tokenizer's Rust code is not a subclass
    of `Exception` either, but belongs to the request whose text the tokenizer read.
    """
    is_shared = isinstance(error, SHARED) or (isinstance(error, RuntimeError) and CPU_MEMORY_ENDED in str(error))
    return (isinstance(error, Exception) and not is_shared) or type(error).__name__ == "PanicException"


def row_error(error: BaseException, index: int) -> str:
    """Return the text of the row's `error` field, and log the traceback of an unexpected exception.

    Raises the exception again if it does not belong to one request.
    """
    if isinstance(error, UserError):
        return str(error)
    if not belongs_to_request(error):
        raise error
    log.error("row %d failed", index, exc_info=error)
    return f"{type(error).__name__}: {error}"

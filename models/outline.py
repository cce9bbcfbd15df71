"""A model without memory (on the meta device), which is no larger than the files that it will be read from."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conf.errors import UserError
from models.causal_lm import CausalLM, ModelShape
from models.formats.base import Checkpoint
from models.registry import Architecture

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
VALUES_PER_BYTE = 4  # no format packs more: Q2_K, the smallest, has 3


def outline(architecture: Architecture, shape: ModelShape, checkpoint: Checkpoint | None) -> CausalLM:
    """Build the model of `shape` on the meta device.

    `checkpoint`: its files bound the model; None, or one that has no weights, sets no bound.
    Raises UserError as soon as the model has more values than the files can hold, so that a damaged config costs no time.
    """
    num_bytes = 0 if checkpoint is None else _weight_bytes(checkpoint.path)
    bound = _AtMost(VALUES_PER_BYTE * num_bytes) if num_bytes else nullcontext()
    try:
        with torch.device("meta"), bound:
            return architecture.build(shape)
    except _TooManyValuesError:
        assert checkpoint is not None
        checkpoint.open_weights({})  # says what is wrong with the files, if anything is
        raise UserError(
            f"{checkpoint.path} does not hold the model that its config describes: that has {shape.num_hidden_layers} layers and "
            f"more values than {num_bytes} bytes of weights can be"
        ) from None


def _weight_bytes(path: Path) -> int:
    """Of all files of weights in a folder and in the folders of ranks in it, or beside a file."""
    folder = path if path.is_dir() else path.parent
    files = (file for pattern in ("*", "*/*") for file in folder.glob(pattern))
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES and file.is_file())


class _TooManyValuesError(Exception):
    pass


class _AtMost(TorchFunctionMode):
    """Counts the values of the tensors that are made while it is on, in this thread."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty and isinstance(made, Tensor):
            self._left -= made.numel()
            if self._left < 0:
                raise _TooManyValuesError
        return made

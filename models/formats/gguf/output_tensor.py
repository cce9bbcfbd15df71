"""A tensor of a GGUF file to write: its parameters, in llama.cpp's order of rows, as blocks of its type."""

import logging
from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from models.formats.base import WeightFile
from models.formats.gguf.imatrix import ImportanceMatrix
from models.formats.gguf.quantize import quantize_rows
from models.formats.gguf.tensors import STORED

log = logging.getLogger(__name__)


class OutputTensor:
    """A tensor of the file: one parameter, or the same matrix of all experts in a layer."""

    type = GGMLQuantizationType.F32
    importance: NDArray[np.float32] | None = None
    """[M, I]: for each of M experts (or 1) the mean square of each input channel."""

    def __init__(self, name: str, shape: tuple[int, ...], change: Callable[[Tensor], Tensor] | None) -> None:
        """`shape`: of the parameter. `change`: the converter's change."""
        self.name = name
        self._change = change
        self.sources: list[tuple[WeightFile, str]] = []
        self._source_shape = shape if change is None else tuple(change(torch.empty(shape, device="meta")).shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.sources), *self._source_shape) if "_exps." in self.name else self._source_shape

    @property
    def num_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape, dtype=np.int64)) // block * block_bytes

    def read(self) -> NDArray[np.uint8]:
        stored = np.empty((len(self.sources), self.num_bytes // len(self.sources)), np.uint8)
        for i, (file, name) in enumerate(self.sources):
            tensor = next(iter(file.read([name])))[1]
            importance = None if self.importance is None else self.importance[i]
            stored[i] = self._bytes(tensor if self._change is None else self._change(tensor), importance)
        return stored.reshape(-1)

    def _bytes(self, tensor: Tensor, importance: NDArray[np.float32] | None) -> NDArray[np.uint8]:
        try:
            if self.type not in STORED:
                return quantize_rows(tensor.float().flatten(0, -2).numpy(), self.type, importance).reshape(-1)
            dtype = STORED[self.type]
            if dtype is torch.float16 and tensor.abs().amax() > torch.finfo(dtype).max:
                raise OverflowError(f"{tensor.abs().amax():.6g}, which float16 cannot")
        except OverflowError as error:
            raise UserError(f"{self.name} holds {error}: give bfloat16 or float32") from error
        return tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy()


def add_importance(tensors: dict[str, OutputTensor], imatrix: ImportanceMatrix | None) -> None:
    """Give the tensors of a file their entries of the importance matrix, if any. A warning counts tensors without one.

    Raises UserError as `ImportanceMatrix.match` does.
    """
    if imatrix is None:
        return
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) > 1}
    entries = imatrix.match({name: (len(tensor.sources), tensor.shape[-1]) for name, tensor in matrices.items()})
    for name, entry in entries.items():
        tensors[name].importance = entry
    quantized = [name for name, tensor in tensors.items() if tensor.type not in STORED]
    if missing := [name for name in quantized if name not in entries]:
        what = "%d of %d tensors are quantised without importance, because %s has no entry for them (%s)"
        log.warning(what, len(missing), len(quantized), imatrix.path, missing[0])

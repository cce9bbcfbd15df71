"""A matrix whose rows are in several tensors of a GGUF file, such as gate and up of one projection."""

import re
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from models.formats.gguf.header import TensorInfo
from models.formats.gguf.names import TensorLayout
from models.formats.gguf.tensors import STORED, read_bytes, read_tensor


@dataclass(frozen=True)
class Stacked:
    names: tuple[str, ...]
    """llama.cpp's names of the parts."""
    parts: tuple[TensorInfo, ...]
    """Each [rows, columns], in the order of the rows."""

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def block_type(self) -> GGMLQuantizationType | None:
        """The type of all rows. None: they are not quantised, or have several types, or factors."""
        types = {part.type for part in self.parts}
        has_factors = any(part.scale is not None for part in self.parts)
        return types.pop() if len(types) == 1 and not types & STORED.keys() and not has_factors else None

    @property
    def dtype(self) -> torch.dtype:
        dtypes = {STORED.get(part.type, torch.float32) for part in self.parts}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def read(self) -> Tensor:
        """Read the matrix, dequantised."""
        return torch.cat([read_tensor(part).to(self.dtype) for part in self.parts])

    def read_blocks(self) -> NDArray[np.uint8]:
        """Read the stored bytes [rows, bytes of a row] of a matrix with one `block_type`."""
        return np.concatenate([read_bytes(part).reshape(part.shape[0], -1) for part in self.parts])


def find_stacked(layout: TensorLayout, tensors: dict[str, TensorInfo]) -> dict[str, Stacked]:
    """Return the matrices of `layout.stacked` by their Hugging Face names.

    Raises UserError for parts that do not fit together.
    """
    stacked = {}
    for parts, module in layout.stacked.items():
        for match in filter(None, (re.fullmatch(rf"blk\.(\d+)\.{parts[0]}\.weight", name) for name in tensors)):
            names = tuple(f"blk.{match[1]}.{part}.weight" for part in parts)
            shapes = [tensors[name].shape if name in tensors else () for name in names]
            if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) > 1:
                problem = f"{tensors[match[0]].path}: {' and '.join(names)} have the shapes {[*map(list, shapes)]}"
                raise UserError(f"{problem}: expected [rows, columns], with equal columns")
            stacked[f"{layout.layers}.{match[1]}.{module}.weight"] = Stacked(names, tuple(tensors[n] for n in names))
    return stacked

"""Matrices whose rows are in one tensor of a GGUF file: of each key head the first matrix's rows, then the second's."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from models.config import ConfigReader
from models.formats.gguf.header import TensorInfo
from models.formats.gguf.names import TensorLayout
from models.formats.gguf.tensors import STORED, read_tensor


@dataclass(frozen=True)
class Share:
    names: tuple[str]
    """llama.cpp's name of the tensor."""
    tensor: TensorInfo
    """[rows of all matrices, columns]."""
    num_key_heads: int
    number: int
    """Which of the matrices this is."""
    num_matrices: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0] // self.num_matrices, self.tensor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return STORED.get(self.tensor.type, torch.float32)

    def read(self) -> Tensor:
        """Read the matrix, dequantised."""
        by_key_head = read_tensor(self.tensor).unflatten(0, (self.num_key_heads, self.num_matrices, -1))
        rows: Tensor = by_key_head[:, self.number].flatten(0, 1)
        return rows


def find_shares(layout: TensorLayout, tensors: dict[str, TensorInfo], config: ConfigReader) -> dict[str, Share]:
    """Return the matrices of `layout.divided` by their Hugging Face names.

    Raises UserError for a tensor whose rows do not divide among the matrices.
    """
    shares = {}
    for part, modules in layout.divided.items():
        for match in filter(None, (re.fullmatch(rf"blk\.(\d+)\.{part}\.weight", name) for name in tensors)):
            tensor, heads = tensors[match[0]], config.count("linear_num_key_heads")
            if len(tensor.shape) != 2 or tensor.shape[0] % (heads * len(modules)):
                problem = f"{tensor.path}: {match[0]} has the shape {list(tensor.shape)}, expected [rows, columns]"
                raise UserError(f"{problem} with a multiple of {heads * len(modules)} rows: convert the model again")
            for i, module in enumerate(modules):
                name = f"{layout.layers}.{match[1]}.{module}.weight"
                shares[name] = Share((match[0],), tensor, heads, i, len(modules))
    return shares

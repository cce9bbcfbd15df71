"""Read one tensor of a GGUF file: as stored, or dequantised."""

import math

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from kernels.linear.block_weight import read_blocks
from models.formats.gguf.header import TensorInfo

STORED = {  # types that are not quantised
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
DEQUANTISED_AT_ONCE = 2**20  # values; keeps the gguf package's intermediate results small


def read_tensor(tensor: TensorInfo) -> Tensor:
    """Read a tensor in its stored dtype, or dequantised to float32 and scaled, into new memory."""
    data = read_bytes(tensor)
    if tensor.type in STORED:
        return torch.from_numpy(data).view(STORED[tensor.type]).view(tensor.shape)
    rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
    values = np.empty((len(rows), tensor.shape[-1]), np.float32)
    at_once = max(1, DEQUANTISED_AT_ONCE // tensor.shape[-1])
    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which the loader reports
        for start in range(0, len(rows), at_once):
            part = rows[start : start + at_once]
            if tensor.scale is None:
                values[start : start + at_once] = dequantize(part, tensor.type)
            else:
                codes = read_blocks(tensor.type.name, torch.from_numpy(part), float(read_scale(tensor)))
                values[start : start + at_once] = codes.dequantize()
    return torch.from_numpy(values).view(tensor.shape)


def read_scale(tensor: TensorInfo) -> Tensor:
    """Read the factor of a tensor, float32 [1]."""
    return torch.ones(1) if tensor.scale is None else read_tensor(tensor.scale)


def read_bytes(tensor: TensorInfo) -> NDArray[np.uint8]:
    """Read a tensor's bytes. Raises UserError if the file became shorter after its header was read."""
    data = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    if len(data) != tensor.num_bytes:
        raise UserError(
            f"{tensor.path} has {len(data)} bytes of the tensor at {tensor.offset}, expected {tensor.num_bytes}: the file was changed"
        )
    return data

"""Read one tensor of a GGUF file: as stored, or dequantised."""

import math

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from models.formats.gguf.header import TensorInfo

STORED = {  # types that are not quantised
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
DEQUANTISED_AT_ONCE = 2**20  # values; keeps the gguf package's intermediate results small


def read_tensor(tensor: TensorInfo) -> Tensor:
    """Read a tensor in its stored dtype, or dequantised to float32, into new memory."""
    data = read_bytes(tensor)
    if tensor.type in STORED:
        return torch.from_numpy(data).view(STORED[tensor.type]).view(tensor.shape)
    rows = data.reshape(math.prod(tensor.shape[:-1]), -1)
    values = np.empty((len(rows), tensor.shape[-1]), np.float32)
    at_once = max(1, DEQUANTISED_AT_ONCE // tensor.shape[-1])
    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which the loader reports
        for start in range(0, len(rows), at_once):
            values[start : start + at_once] = dequantize(rows[start : start + at_once], tensor.type)
    return torch.from_numpy(values).view(tensor.shape)


def read_bytes(tensor: TensorInfo) -> NDArray[np.uint8]:
    """Read a tensor's bytes. Raises UserError if the file became shorter after its header was read."""
    data = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    if len(data) != tensor.num_bytes:
        raise UserError(
            f"{tensor.path} has {len(data)} bytes of the tensor at {tensor.offset}, expected {tensor.num_bytes}: the file was changed"
        )
    return data

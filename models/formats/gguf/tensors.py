"""Read one tensor of a GGUF file: as stored, dequantised, or as codes for quantised layers."""

import math

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from conf.errors import UserError
from models.formats.base import CODE_GROUP
from models.formats.gguf.header import TensorInfo

STORED = {  # types that are not quantised
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# Types with symmetric codes and one scale per CODE_GROUP, which quantised layers use directly.
CODE_BITS = {GGMLQuantizationType.Q8_0: 8, GGMLQuantizationType.Q4_0: 4}
BLOCKS = tuple(
    GGMLQuantizationType[name] for name in ("Q4_1", "Q5_0", "Q5_1", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)  # quantised layers use these blocks directly
SCALE_BYTES = 2  # float16, before a group's codes
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


def read_codes(tensor: TensorInfo) -> tuple[Tensor, Tensor]:
    """Read codes int8 [O, I] and scales float16 [O, I / 32] of a tensor with a type in CODE_BITS, into new memory.

    A group is a scale and its codes. Q8_0 has int8 codes. Q4_0 has codes + 8 in 16 bytes; their lower four bits are the
    group's first half.
    """
    groups = torch.from_numpy(read_bytes(tensor)).view(tensor.shape[0], tensor.shape[1] // CODE_GROUP, -1)
    scales = groups[:, :, :SCALE_BYTES].contiguous().view(torch.float16).flatten(1)
    codes = groups[:, :, SCALE_BYTES:]
    if CODE_BITS[tensor.type] == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=2) - 8  # uint8 wraps as int8 does
    return codes.contiguous().view(torch.int8).flatten(1), scales


def read_bytes(tensor: TensorInfo) -> NDArray[np.uint8]:
    """Read a tensor's bytes. Raises UserError if the file became shorter after its header was read."""
    data = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    if len(data) != tensor.num_bytes:
        raise UserError(
            f"{tensor.path} has {len(data)} bytes of the tensor at {tensor.offset}, expected {tensor.num_bytes}: the file was changed"
        )
    return data

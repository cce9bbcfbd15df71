"""Round numbers to codes, for weights and activations. Rounding saturates, and ties go to the even code."""

from enum import Enum

import torch
from torch import Tensor

from kernels.kv_format import FLOAT8_MAX
from kernels.linear.block_weight import KINDS


class CodeKind(Enum):
    INT = "int"
    FP8 = "fp8"  # e4m3
    Q4_0 = "q4_0"  # this and the following members: ggml's block types
    Q8_0 = "q8_0"
    IQ4_NL = "iq4_nl"
    IQ4_XS = "iq4_xs"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q3_K = "q3_k"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"

    @property
    def is_blocks(self) -> bool:
        return self.name in KINDS


def to_int8(ratio: Tensor, lowest: float = -128, highest: float = 127) -> Tensor:
    """Return int8 codes in [lowest, highest]. ratio: any shape and float dtype, already divided by its scale."""
    return ratio.round().clamp_(lowest, highest).to(torch.int8)


def to_fp8(ratio: Tensor) -> Tensor:
    """Return float8_e4m3fn codes. No rounding to whole numbers comes first: below 8 the format has steps finer than 1."""
    return ratio.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


def scale_of(largest: Tensor, highest_code: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return scales [...] float32, largest / highest_code, rounded to values of `dtype`. largest: [...], not negative.

    A scale is 1 if the quotient underflows in `dtype`. All codes of that group are then 0, and no division by 0 occurs.
    """
    scale = (largest.float() / highest_code).clamp(max=torch.finfo(dtype).max).to(dtype).float()
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)

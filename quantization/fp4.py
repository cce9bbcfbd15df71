"""Choose the codes and scales of FP4 weights: MXFP4 (OCP Microscaling 1.0) and NVFP4.

O output channels, I input channels, G groups of N input channels that share a scale.
"""

import torch
from torch import Tensor

from kernels.kv_format import FLOAT8_MAX
from kernels.linear.block_weight import FP4_VALUES, KINDS

LARGEST = float(FP4_VALUES.max())
LARGEST_BYTE = {"MXFP4": 253, "NVFP4": 126}  # of a scale: 2^126, 448
STEPS = {"MXFP4": (0, 1), "NVFP4": (0, -1, 1, 4, 5)}
"""Tried bytes of a group's scale, minus the byte by the usual rule.

The rule of MXFP4 is floor(log2(largest)) - 2, which saturates numbers above 6; the next byte does not. The rule of NVFP4
maps the largest number to 6; four and five bytes more map it to about 4, so that the steps between 4 and 6 are not
used. Squared error of normal numbers by the rule alone and by the search: MXFP4 0.0132 and 0.0125, NVFP4 0.0091 and
0.0067; all bytes from -2 to 6 give 0.0066.
"""
_CODES = torch.zeros(13, dtype=torch.uint8)
_CODES[(2 * FP4_VALUES[:8]).int()] = torch.arange(8, dtype=torch.uint8)
"""The code of a magnitude, by its double."""


def global_scale_of(largest: Tensor) -> float:
    """Return the global scale of an NVFP4 weight whose largest magnitude is given.

    It is the reciprocal of the float32 that files hold, by which scales are divided: 448 * 6 / largest, or 1 if that
    overflows.
    """
    return 1 / float((FLOAT8_MAX * LARGEST / largest.float()).nan_to_num(posinf=1.0))


def quantize_rows(weight: Tensor, kind: str, global_scale: float) -> Tensor:
    """Return the blocks uint8 [O, bytes] of finite weight [O, I], of any float dtype: the least squared errors of STEPS.

    `kind`: a key of STEPS. The blocks divide I. global_scale: as in BlockCodes, 1 for MXFP4.
    """
    format, dtype = KINDS[kind], KINDS[kind].factor_dtype
    table = torch.arange(256, dtype=torch.uint8, device=weight.device).view(dtype).double()
    table = (table * global_scale).float()  # by byte
    groups = weight.float().unflatten(1, (-1, format.group_size)).permute(2, 0, 1).contiguous()  # [N, O, G]
    first = _first_bytes(groups.abs().amax(0), kind, global_scale)
    best, least = first, torch.full(first.shape, torch.inf, device=weight.device)
    for step in STEPS[kind]:
        candidate = (first + step).clamp_(1, LARGEST_BYTE[kind])
        scales = table[candidate]
        errors = _rounded(groups / scales).mul_(scales).sub_(groups).square_().sum(0)
        best, least = torch.where(errors < least, candidate, best), torch.minimum(errors, least)
    values = _rounded(groups / table[best])
    codes = _CODES.to(weight.device)[(2 * values.abs()).int()] | (values < 0).byte() << 3
    low, high = codes.unflatten(0, (2, -1))
    halves = (low | high << 4).permute(1, 2, 0)  # [O, G, N / 2]
    per_block = format.block_size // format.group_size
    parts = best.byte().unflatten(1, (-1, per_block)), halves.unflatten(1, (-1, per_block)).flatten(2)
    return torch.cat(parts, 2).flatten(1)


def _first_bytes(largest: Tensor, kind: str, global_scale: float) -> Tensor:
    """Return the bytes int64 [O, G] of scales by the rule, for the largest magnitudes [O, G] of the groups."""
    if kind == "MXFP4":
        exponents: Tensor = torch.frexp(largest).exponent.long() - 3  # floor(log2(largest)) - 2
        return (exponents + 127).clamp_(1, LARGEST_BYTE[kind])
    scales = (largest.double() / (LARGEST * global_scale)).float().clamp_(max=FLOAT8_MAX)
    return scales.to(torch.float8_e4m3fn).view(torch.uint8).long().clamp_(min=1)


def _rounded(numbers: Tensor) -> Tensor:
    """Return numbers rounded to values of FP4. Rounding saturates, and ties go to the even code."""
    magnitudes = numbers.abs().clamp_(max=LARGEST)
    exponents = (magnitudes.view(torch.int32) & 0x7F800000).view(torch.float32)  # powers of two
    steps = exponents.clamp_(min=1).mul_(0.5)
    return (magnitudes / steps).round_().mul_(steps).copysign_(numbers)

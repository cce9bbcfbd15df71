"""Products with float8 weights in torch operators, on any device. M rows, K inputs, N outputs, G groups of inputs.

A code is exact in bfloat16, and so are the products of two in float32: codes are multiplied as the floats that they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.matmul.reference import linear

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Float8Weight:
    """value[o, i] = code[o, i] * scale[o, i // group_size]."""

    codes: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [N, G] or [1, 1] float32

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of its memory, by name."""
        return {"codes": self.codes, "scales": self.scales}


def quant_matmul(x: Tensor, weight: Float8Weight) -> Tensor:
    """x [M, K] times weight transposed: [M, N] in x's dtype, to which the weight is rounded first."""
    codes, scales = weight.codes.to(x.dtype), weight.scales
    values = codes.unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]  # [N, G, K / G]
    return linear(x, values.flatten(1).to(x.dtype))


def quant_matmul_float8(
    x_codes: Tensor, x_scales: Tensor, weight: Float8Weight, out_dtype: torch.dtype, x_group_size: int | None
) -> Tensor:
    """(x_codes * x_scales) times weight transposed: [M, N] in `out_dtype`. Sums of a group are made of codes alone, scales come after."""
    codes, scales = weight.codes, weight.scales
    if scales.shape[1] == 1:
        products = linear(x_codes.to(out_dtype), codes.to(out_dtype))
        return (products * x_scales * scales.reshape(1, -1)).to(out_dtype)
    width, x_width = weight.num_inputs // scales.shape[1], x_group_size or weight.num_inputs
    total = torch.zeros(len(x_codes), len(codes), device=codes.device)
    for group, start in enumerate(range(0, weight.num_inputs, width)):
        inputs = slice(start, start + width)
        products = linear(x_codes[:, inputs].float(), codes[:, inputs].float())
        total += products * x_scales[:, start // x_width, None] * scales[:, group]
    return total.to(out_dtype)


def quantize_rows(x: Tensor, group_size: int | None) -> tuple[Tensor, Tensor]:
    """As `quantize_rows_float8` of the package says."""
    size = min(group_size or x.shape[1], x.shape[1])
    groups = functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))  # [M, K / size, size]
    scales = groups.abs().amax(2) / FLOAT8_MAX
    scales = torch.where(scales == 0, 1.0, torch.where(scales.isfinite(), scales, torch.nan))
    # converting alone does not saturate
    ratio = (groups / scales[:, :, None]).nan_to_num().clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return ratio.to(torch.float8_e4m3fn).flatten(1)[:, : x.shape[1]], scales

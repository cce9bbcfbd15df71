"""placeholder"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class PackedWeight:
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    bits: int

    @property
    def blob(self) -> Tensor:
        return self.codes

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.codes, self.scales, self.zero_points

    def _dequantize(self) -> Tensor:
        codes = self.codes.float().unflatten(1, (self.scales.shape[1], -1))
        if self.zero_points is not None:
            codes = codes - self.zero_points.unsqueeze(2)
        weight: Tensor = (codes * self.scales.unsqueeze(2)).flatten(1)
        return weight


def pack(codes: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> PackedWeight:
    return PackedWeight(codes, scales, zero_points, bits)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.shape[0]
    return functional.linear(functional.pad(x, (0, 0, 0, max(0, 16 - rows))), weight)[:rows]


def quant_matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    return _linear(x.float(), weight._dequantize()).to(x.dtype)


def quant_matmul_int8(x_codes: Tensor, x_scales: Tensor, weight: PackedWeight, out_dtype: torch.dtype) -> Tensor:
    return (_linear(x_codes.float(), weight._dequantize()) * x_scales).to(out_dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.float().abs().amax(1, keepdim=True) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return (x.float() / scales).round().to(torch.int8), scales

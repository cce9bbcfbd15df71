"""Products with float8 weights in torch operators, on any device. M rows, K inputs, N outputs, G groups of inputs.

A code is exact in bfloat16, and so are the products of two in float32: codes are multiplied as the floats that they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.plain import linear
from kernels.quantize_rows.rows import QuantizedActivations, Rows


@dataclass(frozen=True)
class Float8Weight:
    """value[o, i] = code[o, i] * scale[o, i // group_size]."""

    codes: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [N, G] or [1, 1] float32

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    def cut(self, outputs: slice) -> "Float8Weight":
        """Return the weight of some outputs: a view."""
        return Float8Weight(self.codes[outputs], self.scales if len(self.scales) == 1 else self.scales[outputs])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of its memory, by name."""
        return {"codes": self.codes, "scales": self.scales}


def matmul(x: Rows, weight: Float8Weight) -> Tensor:
    """Return x [M, K] times weight transposed: [M, N] in x's dtype. Beside floats the weight is rounded to their dtype first."""
    if isinstance(x, QuantizedActivations):
        return _matmul_codes(x, weight)
    codes, scales = weight.codes.to(x.dtype), weight.scales
    values = codes.unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]  # [N, G, K / G]
    return linear(x, values.flatten(1).to(x.dtype))


def _matmul_codes(x: QuantizedActivations, weight: Float8Weight) -> Tensor:
    """Return the product of codes: the sums of a group are made of codes alone, scales come after."""
    codes, scales = weight.codes, weight.scales
    if scales.shape[1] == 1:
        wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32  # the sums do not fit into float16
        products = linear(x.codes.to(wide), codes.to(wide))
        return (products * x.scales * scales.reshape(1, -1)).to(x.dtype)
    width, x_width = weight.num_inputs // scales.shape[1], x.group_size or weight.num_inputs
    total = torch.zeros(len(x), len(codes), device=codes.device)
    for group, start in enumerate(range(0, weight.num_inputs, width)):
        inputs = slice(start, start + width)
        products = linear(x.codes[:, inputs].float(), codes[:, inputs].float())
        total += products * x.scales[:, start // x_width, None] * scales[:, group]
    return total.to(x.dtype)

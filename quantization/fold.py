"""Scales and shifts of an activation's channels, folded into the weights on both sides of it, so that the float model computes what it did.

O output channels, I input channels, D channels of a norm. Arithmetic is float32; results have the dtype of what they replace, so a weight
that is to be quantised next is better given in float32.
"""

import torch
from torch import Tensor


def divide_norm(
    weight: Tensor, bias: Tensor | None, scales: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias [D] of a norm whose output is divided by scales [D]. Gemma's norms, which multiply by 1 + weight, have offset 1."""
    divided = ((weight.float() + offset) / scales - offset).to(weight.dtype)
    return divided, None if bias is None else (bias.float() / scales).to(bias.dtype)


def divide_outputs(weight: Tensor, bias: Tensor | None, scales: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight [O, I] and bias [O] of a linear layer whose output is divided by scales [O]."""
    divided = (weight.float() / scales.unsqueeze(1)).to(weight.dtype)
    return divided, None if bias is None else (bias.float() / scales).to(bias.dtype)


def multiply_inputs(weight: Tensor, scales: Tensor) -> Tensor:
    """The weight [O, I] of a linear layer whose input was divided by scales [I]."""
    return (weight.float() * scales).to(weight.dtype)


def shift_norm(bias: Tensor | None, shift: Tensor) -> Tensor:
    """The bias [D] of a norm whose output is lessened by shift [D]; a norm without a bias gets one, of shift's dtype."""
    return -shift if bias is None else (bias.float() - shift).to(bias.dtype)


def shift_inputs(weight: Tensor, bias: Tensor | None, shift: Tensor) -> Tensor:
    """The bias [O] of a linear layer, weight [O, I], whose input was lessened by shift [I]; one is made, in weight's dtype, if absent."""
    added = weight.float() @ shift.float()
    return added.to(weight.dtype) if bias is None else (bias.float() + added).to(bias.dtype)


def midpoint(minimum: Tensor, maximum: Tensor) -> Tensor:
    """The shift that centres channels of the given bounds: (min + max) / 2 (Outlier Suppression+, arXiv 2304.09145)."""
    return torch.lerp(minimum, maximum, 0.5)

"""Fold scales and shifts of activation channels into adjacent weights. The float model's output stays the same.

O output channels, I input channels, D channels of a norm. Arithmetic is float32. A result has the dtype of the tensor
that it replaces: pass float32 for a weight that is quantised next.
"""

import torch
from torch import Tensor


def divide_norm(
    weight: Tensor, bias: Tensor | None, scales: Tensor, offset: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias [D] that divide a norm's output by scales [D].

    offset: 1 for Gemma's norms, which multiply by 1 + weight.
    """
    divided = ((weight.float() + offset) / scales - offset).to(weight.dtype)
    return divided, None if bias is None else (bias.float() / scales).to(bias.dtype)


def divide_outputs(weight: Tensor, bias: Tensor | None, scales: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weight [O, I] and bias [O] that divide a linear layer's output by scales [O]."""
    divided = (weight.float() / scales.unsqueeze(1)).to(weight.dtype)
    return divided, None if bias is None else (bias.float() / scales).to(bias.dtype)


def multiply_inputs(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [O, I] for an input that was divided by scales [I]."""
    return (weight.float() * scales).to(weight.dtype)


def shift_norm(bias: Tensor | None, shift: Tensor) -> Tensor:
    """Return the bias [D] that subtracts shift [D] from a norm's output.

    A norm without a bias gets one, of shift's dtype.
    """
    return -shift if bias is None else (bias.float() - shift).to(bias.dtype)


def shift_inputs(weight: Tensor, bias: Tensor | None, shift: Tensor) -> Tensor:
    """Return the bias [O] of a linear layer after shift [I] was subtracted from its input. weight: [O, I].

    A layer without a bias gets one, of weight's dtype.
    """
    added = weight.float() @ shift.float()
    return added.to(weight.dtype) if bias is None else (bias.float() + added).to(bias.dtype)


def midpoint(minimum: Tensor, maximum: Tensor) -> Tensor:
    """Return the shift (min + max) / 2 that centres channels (Outlier Suppression+, arXiv 2304.09145)."""
    return torch.lerp(minimum, maximum, 0.5)

"""C input channels of a block of GPTQ (arXiv 2210.17323), O output channels."""

import torch
from torch import Tensor


def round_channels(
    weights: Tensor,
    factor: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    kept: Tensor | None,
    codes: Tensor,
    errors: Tensor,
    lowest: float,
    highest: float,
) -> None:
    """Round input channels one after the other, and correct the next channels of the block for each error.

    The first R channels are rounded. weights: [C, O] float32, the corrected weights of a block. Later channels are
    corrected in place. factor: [C, C] float32; the part below the diagonal is not read. codes: [R, O] int8 or
    float8_e4m3fn. scales: [R, O] float32. zero_points: [R, O] int8, or None. kept: [R, O] bool, False for pruned
    weights, which get the code of 0; None keeps all. errors: [R, O] float32, the error of each weight divided by the
    diagonal element of `factor`.
    """
    for i in range(len(codes)):
        weight = weights[i] if kept is None else weights[i].where(kept[i], 0)
        ratio = weight / scales[i]
        if codes.dtype != torch.int8:
            codes[i] = ratio.clamp(lowest, highest).to(codes.dtype)
            rounded = codes[i].float() * scales[i]
        else:
            zeros = 0 if zero_points is None else zero_points[i].float()
            codes[i] = (ratio.round() + zeros).clamp(lowest, highest)
            rounded = (codes[i].float() - zeros) * scales[i]
        errors[i] = (weights[i] - rounded) / factor[i, i]
        weights[i + 1 :] -= factor[i, i + 1 :, None] * errors[i]

"""Search of scales for 4-bit codes. O outputs, I inputs, G groups of N inputs, padded with zeros to a multiple of LANES."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

LANES = 16  # as in simd.h; the order of a sum's additions depends on it
STEPS = range(15, 6, -1)
"""Tried codes of the extreme, counted from the zero point."""


def fit_scales(
    weight: Tensor, group_size: int, is_symmetric: bool, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the scales float32 [O, G] and the zero points int8 [O, G] of the least squared error.

    weight: [O, I] finite, of any float dtype. The error of a number is (clamp(round(w / s)) * s - w)^2. A candidate
    represents the extreme of its group, the number with the largest magnitude, by a whole code: s = extreme / steps,
    rounded to `scale_dtype`. A scale that underflows is 1. The first of several equal candidates wins.

    Symmetric: codes -8 to 7; the extreme has code 7, or -8 with a scale of the other sign. Zero points are [O, 0].
    Asymmetric: codes 0 to 15; the extreme has code 0 or 15, and the zero point is 7 to 15 steps away.
    """
    groups = weight.float().unflatten(1, (-1, group_size))  # [O, G, I / G]
    groups = functional.pad(groups, (0, -group_size % LANES)).unflatten(2, (-1, LANES))  # [O, G, N / LANES, LANES]
    low, high = groups.amin((2, 3)), groups.amax((2, 3))  # [O, G]
    best: list[Tensor] = []  # scales, zero points and errors
    for scale, zero in _candidates(-low > high, torch.maximum(-low, high), is_symmetric, scale_dtype):
        candidate = [scale, zero, _squared_error(groups, scale, zero)]
        best = (
            [torch.where(candidate[2] < best[2], *pair) for pair in zip(candidate, best, strict=True)]
            if best
            else candidate
        )
    return best[0], (best[1][:, :0] if is_symmetric else best[1]).to(torch.int8)


def _candidates(
    is_negative: Tensor, magnitude: Tensor, is_symmetric: bool, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and zero points [O, G] for extremes of this sign and magnitude."""
    if is_symmetric:
        sign, zero = torch.where(is_negative, -1.0, 1.0), torch.full_like(magnitude, 8)
        yield sign * _rounded(magnitude / 7, dtype), zero
        yield -sign * _rounded(magnitude / 8, dtype), zero
    else:
        for steps in STEPS:
            yield _rounded(magnitude / steps, dtype), torch.where(is_negative, float(steps), 15.0 - steps)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    scale = scale.clamp(max=torch.finfo(dtype).max).to(dtype).float()
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def _squared_error(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the error [O, G]. Each lane adds in order; then lanes are added at distances 8, 4, 2 and 1."""
    ratio = groups * (1 / scales)[:, :, None, None]
    lowest, highest = -zeros[:, :, None, None], (15 - zeros)[:, :, None, None]
    error = (ratio.clamp(lowest, highest).round() - ratio).square()
    total = error[:, :, 0]  # [O, G, LANES]
    for step in error.unbind(2)[1:]:
        total = total + step
    while total.shape[2] > 1:
        half = total.shape[2] // 2
        total = total[:, :, :half] + total[:, :, half:]
    return total.squeeze(2) * (scales * scales)

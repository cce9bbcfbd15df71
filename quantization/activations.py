"""Ranges of activations over a calibration run, and quantisation of activations.

T tokens, I channels. Activation codes are int8 from -128 to 127 or float8_e4m3fn. A scale is absmax / 127 or absmax /
448; a static scale may be smaller.
"""

import torch
from torch import Tensor

from conf.errors import UserError
from kernels.kv_format import FLOAT8_MAX
from kernels.threads import threads
from quantization.codes import CodeKind, scale_of, to_fp8, to_int8

HIGHEST = {CodeKind.INT: 127, CodeKind.FP8: FLOAT8_MAX}
NUM_SHARES = 8  # shares of absmax that are tried: 1, 9/10 .. 3/10


def check_activations(num_tokens: int, *values: Tensor) -> None:
    """Raises UserError if no activation reached a layer, or if `values` computed from activations are not finite."""
    if num_tokens == 0:
        raise UserError("no activations reached this layer: give more calibration data, or skip this layer")
    if not all(map(all_finite, values)):
        raise UserError("activations are NaN or infinite: calibrate in float32 or bfloat16, or skip this layer")


def all_finite(x: Tensor) -> bool:
    """Return whether no element of x, which is not empty, is NaN or infinite.

    The extremes carry a NaN. torch's isfinite of every element takes 25 times as long.
    """
    return bool(torch.stack(x.aminmax()).isfinite().all())


class ActivationRange:
    """Minimum and maximum of each channel over all added activations."""

    def __init__(self, num_channels: int, device: torch.device | str = "cpu") -> None:
        self._minimum = torch.full((num_channels,), float("inf"), device=device)
        self._maximum = torch.full((num_channels,), float("-inf"), device=device)
        self._num_tokens = 0

    def add(self, x: Tensor) -> None:
        """Add activations x [T, I] of any float dtype. The split into calls does not change the result."""
        if len(x):
            self._minimum = torch.minimum(self._minimum, x.amin(0).float())
            self._maximum = torch.maximum(self._maximum, x.amax(0).float())
            self._num_tokens += len(x)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return minimum and maximum, [I] float32 each. Raises UserError as check_activations does."""
        check_activations(self._num_tokens, self._minimum, self._maximum)
        return self._minimum, self._maximum


def static_scale(absmax: Tensor, kind: CodeKind) -> Tensor:
    """Return the scale [] float32 of a layer's activations. absmax: the largest magnitude of each channel, [I]."""
    return scale_of(absmax.max(), HIGHEST[kind])


def best_static_scale(absmax: Tensor, x: Tensor, kind: CodeKind) -> Tensor:
    """Return the static scale [] float32 for absmax [I].

    For int8 it is the share of that scale with the least squared error on x.

    x: [T, I]. A few large values may saturate, so that all other values get finer steps. fp8 needs no search: its steps
    are relative to the value.
    """
    largest = static_scale(absmax, kind)
    if kind is CodeKind.FP8:
        return largest
    scales = [largest * (1 - step / 10) for step in range(NUM_SHARES)]
    errors = [sum_of_squares(quantize_static(x, scale, kind).float() * scale - x) for scale in scales]
    return scales[int(torch.stack(errors).argmin())]


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of the squares of x, [].

    One thread adds, because the last bits of torch's sum depend on the thread count.
    """
    with threads(None):
        return x.square().sum()


def quantize_static(x: Tensor, scale: Tensor, kind: CodeKind) -> Tensor:
    """Return the codes of x, in its shape, for a given scale. Values outside the range saturate."""
    ratio = x.float() / scale
    return to_int8(ratio) if kind is CodeKind.INT else to_fp8(ratio)


def quantize_per_token(x: Tensor, kind: CodeKind) -> tuple[Tensor, Tensor]:
    """Return codes [T, I] of x [T, I], and scales [T, 1] float32 from the largest magnitude of each token."""
    scales = scale_of(x.abs().amax(1, keepdim=True), HIGHEST[kind])
    return quantize_static(x, scales, kind), scales

"""Quantise rows to llama.cpp's block types without an importance matrix, bit-exactly as llama-quantize does.

The gguf package quantises to blocks of 32. This module adds the super-block types Q4_K, Q5_K and Q6_K. A super-block
has 256 values in groups. The scale of a group is an integer multiple of one float16 step. It is found by search: each
candidate rounds the values to codes, and least squares fit the scale (and the minimum, if the type has one) to the
codes. Candidates, weights and the order of float32 operations are from ggml-quants.c.

B super-blocks with G groups of N values each. Values are [N, G, B], so that a sum over N adds values one by one, as
ggml does.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, QK_K, GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

VALUES_AT_ONCE = 2**18  # intermediate results stay in cache
STEP = np.float32(0.1)  # between candidates, in codes
SMALLEST = np.float32(1e-15)  # for Q6_K: if all magnitudes are below it, the values count as zeros
LARGEST_SCALE = np.float32(63)  # of Q4_K and Q5_K; scales and minima begin at 0
Q6_CODES, Q6_SCALES = np.float32(32), np.float32(128)  # codes of Q6_K: -32 to 31; scales: -128 to 127
FLOAT16_PLACES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Byte offsets of the float16 numbers in a block. Other types have one, at offset 0."""


def quantize_rows(rows: Floats, kind: GGMLQuantizationType) -> Bytes:
    """Return the blocks uint8 [rows, bytes] of float32 rows. The row length is a multiple of the type's block size.

    Raises OverflowError for values that are not finite, or whose scale exceeds float16's range.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.empty((len(rows), rows.shape[1] // block * block_bytes), np.uint8)
    at_once = max(1, VALUES_AT_ONCE // rows.shape[1])

    def fill(start: int) -> None:
        part = rows[start : start + at_once]
        with np.errstate(all="ignore"):  # equal values divide by zero; candidates that are not finite lose
            if kind in SUPER_BLOCKS:
                blocks[start : start + at_once] = SUPER_BLOCKS[kind].quantize(part).reshape(len(part), -1)
            else:
                blocks[start : start + at_once] = quantize(part, kind)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(0, len(rows), at_once)))
    flat_blocks = blocks.reshape(-1, block_bytes)
    numbers: list[NDArray[Any]] = [rows]
    for place in FLOAT16_PLACES.get(kind.name, (0,)):
        numbers.append(flat_blocks[:, place : place + 2].copy().view(np.float16))
    if not all(np.isfinite(values).all() for values in numbers):
        raise OverflowError(f"{np.abs(rows).max():.6g}, which {kind.name} cannot")
    return blocks


def quantize_tensor(weight: Tensor, kind: str) -> Tensor:
    """Return the blocks uint8 [O, bytes] of weight [O, I] of any float dtype. `kind`: a type's name. Raises as `quantize_rows`."""
    return torch.from_numpy(quantize_rows(weight.float().contiguous().numpy(), GGMLQuantizationType[kind]))


def _by_value(rows: Floats, size: int) -> Floats:
    """Return rows as [N, G, B]. `size`: N."""
    return np.ascontiguousarray(rows.reshape(-1, QK_K // size, size).transpose(2, 1, 0))


def _by_block(codes: Floats) -> Bytes:
    """Return integer codes [N, G, B] as [B, G, N]."""
    return codes.astype(np.uint8).transpose(2, 1, 0)


def _joined(*parts: NDArray[Any]) -> Bytes:
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


@dataclass(frozen=True)
class AffineSuperBlock:
    """Q4_K and Q5_K: eight groups of 32 values, each value is scale * code - minimum."""

    largest: np.float32
    """Largest code; the smallest is 0."""
    first: np.float32
    """The first candidate divides the value range into `largest + first` steps."""
    num_candidates: int

    def quantize(self, rows: Floats) -> Bytes:
        """Return the blocks [B, bytes].

        A block has the steps of scales and minima, packed scales and minima, fifth bits of codes if any, and low four
        bits.
        """
        x = _by_value(rows, 32)
        scales, minima, codes = self._search(x)
        scale_step, scale_codes = _steps(scales)
        minimum_step, minimum_codes = _steps(minima)
        scales = scale_step.astype(np.float32) * scale_codes
        minima = minimum_step.astype(np.float32) * minimum_codes
        rounded = _by_block(np.where(scales == 0, codes, self._round((x + minima) / scales)))
        fifth_bits = [np.packbits(rounded >> 4, axis=1, bitorder="little")] if self.largest > 15 else []
        steps = np.stack((scale_step, minimum_step), axis=1).view(np.uint8)
        four_bits = rounded[:, 0::2] & 15 | rounded[:, 1::2] << 4
        return _joined(steps, _pack_six_bits(scale_codes, minimum_codes), *fifth_bits, four_bits)

    def _search(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the groups' scales and minima [8, B], and the codes [32, 8, B] of the best candidate."""
        weights = np.sqrt((x * x).sum(0) / np.float32(len(x))) + np.abs(x)
        sum_w, sum_wx = weights.sum(0), (weights * x).sum(0)
        low, high = np.minimum(x.min(0), 0), x.max(0)
        is_flat = low == high
        inverse = np.where(is_flat, 0, self.largest / (high - low))
        scale = np.where(is_flat, 0, 1 / inverse)
        best = inverse, low  # of the best candidate, for its rounding
        error = _error(weights, scale * self._round(inverse * (x - low)) + low - x)
        for i in range(self.num_candidates):
            inverse = (self.first + STEP * np.float32(i) + self.largest) / (high - low)
            codes = self._round(inverse * (x - low))
            weighted = weights * codes
            sum_l, sum_ll, sum_lx = weighted.sum(0), (weighted * codes).sum(0), (weighted * x).sum(0)
            determinant = sum_w * sum_ll - sum_l * sum_l
            fitted_low = (sum_ll * sum_wx - sum_l * sum_lx) / determinant
            fitted_scale = (sum_w * sum_lx - sum_wx * sum_l) / determinant
            fitted_scale = np.where(fitted_low > 0, sum_lx / sum_ll, fitted_scale)
            fitted_low = np.where(fitted_low > 0, 0, fitted_low)
            fitted_error = _error(weights, fitted_scale * codes + fitted_low - x)
            is_better = (determinant > 0) & (fitted_error < error)
            best = np.where(is_better, inverse, best[0]), np.where(is_better, low, best[1])
            error = np.where(is_better, fitted_error, error)
            scale, low = np.where(is_better, fitted_scale, scale), np.where(is_better, fitted_low, low)
        return scale, -low, self._round(best[0] * (x - best[1]))

    def _round(self, codes: Floats) -> Floats:
        return np.clip(np.rint(codes), 0, self.largest)


def _error(weights: Floats, difference: Floats) -> Floats:
    total: Floats = (weights * (difference * difference)).sum(0)
    return total


def _steps(values: Floats) -> tuple[NDArray[np.float16], Floats]:
    """Return the step [B], and the multiples [8, B] of it that represent nonnegative `values` [8, B]."""
    largest = values.max(0)
    inverse, step = np.where(largest > 0, (LARGEST_SCALE / largest, largest / LARGEST_SCALE), 0)
    return step.astype(np.float16), np.clip(np.rint(inverse * values), 0, LARGEST_SCALE)


def _pack_six_bits(scales: Floats, minima: Floats) -> Bytes:
    """Return eight scales and eight minima, each [8, B], in 12 bytes [B, 12].

    The top two bits of the last four numbers are in the bytes of the first four.
    """
    numbers = np.stack((scales, minima)).astype(np.uint8)
    first, last = numbers[:, :4], numbers[:, 4:]
    return np.concatenate((*(first | last >> 4 << 6), last[0] & 15 | last[1] << 4)).T


class SignedSuperBlock:
    """Q6_K: 16 groups of 16 values, each value is scale * code, both signed."""

    def quantize(self, rows: Floats) -> Bytes:
        """Return the blocks [B, bytes]: low four bits of the codes, upper two bits, scales, and their step."""
        x = _by_value(rows, 16)
        scales, codes = self._search(x)
        largest = _extreme(scales)
        is_zero = np.abs(largest) < SMALLEST
        inverse = -Q6_SCALES / largest
        step = np.where(is_zero, 0, 1 / inverse).astype(np.float16)
        scale_codes = np.where(is_zero, 0, np.minimum(np.rint(inverse * scales), Q6_SCALES - 1))
        scales = step.astype(np.float32) * scale_codes
        codes = np.where(scales == 0, codes, self._round(x / scales) + Q6_CODES)
        quarters = _by_block(np.where(is_zero, 0, codes)).reshape(-1, 2, 4, 32)  # [B, half, quarter of the half, value]
        four_bits = quarters[:, :, :2] & 15 | quarters[:, :, 2:] << 4
        two_bits = np.bitwise_or.reduce(quarters >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=2)
        packed_scales = scale_codes.astype(np.int8).T.view(np.uint8)
        return _joined(four_bits, two_bits, packed_scales, step[:, None].view(np.uint8))

    def _search(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the groups' scales [16, B], and the best candidate's codes [16, 16, B], shifted to begin at 0."""
        extreme, weights = _extreme(x), x * x
        is_zero = np.abs(extreme) < SMALLEST
        best_inverse = scale = best = np.zeros_like(extreme)
        for i in (0, *range(-9, 0), *range(1, 10)):
            inverse = -(Q6_CODES + STEP * np.float32(i)) / extreme
            codes = self._round(inverse * x)
            sum_lx, sum_ll = (weights * x * codes).sum(0), (weights * codes * codes).sum(0)
            is_better = (sum_ll > 0) & ((i == 0) | (sum_lx * sum_lx > best * sum_ll))
            scale = np.where(is_better, sum_lx / sum_ll, scale)
            best = np.where(is_better, scale * sum_lx, best)
            best_inverse = np.where(is_better | (i == 0), inverse, best_inverse)
        codes = np.where(is_zero, 0, self._round(best_inverse * x) + Q6_CODES)
        return np.where(is_zero, 0, scale), codes

    def _round(self, codes: Floats) -> Floats:
        return np.clip(np.rint(codes), -Q6_CODES, Q6_CODES - 1)


def _extreme(x: Floats) -> Floats:
    """Return the value with the largest magnitude along the first axis; the first one if several are equal."""
    extreme: Floats = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    return extreme


SUPER_BLOCKS: dict[GGMLQuantizationType, AffineSuperBlock | SignedSuperBlock] = {
    GGMLQuantizationType.Q4_K: AffineSuperBlock(np.float32(15), np.float32(-1), 21),
    GGMLQuantizationType.Q5_K: AffineSuperBlock(np.float32(31), np.float32(-0.5), 16),
    GGMLQuantizationType.Q6_K: SignedSuperBlock(),
}

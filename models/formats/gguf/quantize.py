"""Quantise rows to llama.cpp's block types, bit-exactly as llama-quantize does, without or with an importance matrix.

Without one, the gguf package quantises to blocks of 32. This module adds the super-block types Q3_K to Q6_K, and all
types with an importance matrix. A super-block has 256 values in groups. The scale of a group is an integer multiple
of one float16 step. Scales are found by search (fits.py).

B super-blocks with G groups of N values each. Values are [N, G, B], so that a sum over N adds values one by one.
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

from models.formats.gguf.fits import (
    SMALLEST,
    STEP,
    Floats,
    extreme,
    fit_affine,
    fit_by_exchange,
    fit_multiples,
    fit_signed,
    total,
)

Bytes = NDArray[np.uint8]

VALUES_AT_ONCE = 2**18  # intermediate results stay in cache
BLOCK = 32  # values of the shortest blocks
LARGEST_SCALE = np.float32(63)  # of Q4_K and Q5_K; scales and minima begin at 0
Q3_CODES, Q3_SCALES = np.float32(4), np.float32(32)  # codes of Q3_K: -4 to 3; scales: -32 to 31
Q6_CODES, Q6_SCALES = np.float32(32), np.float32(128)  # codes of Q6_K: -32 to 31; scales: -128 to 127
WEIGHTED_OFFSETS = np.float32(-0.9) + np.float32(0.05) * np.arange(37, dtype=np.float32)
"""The candidates of types with minima and an importance matrix."""
FLOAT16_PLACES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q3_K": (108,), "Q6_K": (208,)}
"""Byte offsets of the float16 numbers in a block. Other types have one, at offset 0."""


def quantize_rows(rows: Floats, kind: GGMLQuantizationType, importance: Floats | None = None) -> Bytes:
    """Return the blocks uint8 [rows, bytes] of float32 rows. The row length is a multiple of the type's block size.

    importance: the mean square of the input of each column, float32 [row length], or None. Q8_0 does not use it. Raises
    OverflowError for values that are not finite, or whose scale exceeds float16's range.
    """
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.empty((len(rows), rows.shape[1] // block * block_bytes), np.uint8)
    at_once = max(1, VALUES_AT_ONCE // rows.shape[1])

    def fill(start: int) -> None:
        part = rows[start : start + at_once]
        with np.errstate(all="ignore"):  # equal values divide by zero; candidates that are not finite lose
            if kind in SUPER_BLOCKS:
                blocks[start : start + at_once] = SUPER_BLOCKS[kind].quantize(part, importance).reshape(len(part), -1)
            elif importance is not None and kind in SHORT_BLOCKS:
                quantized = SHORT_BLOCKS[kind].quantize(part, importance)
                blocks[start : start + at_once] = quantized.reshape(len(part), -1)
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


def quantize_tensor(weight: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Return the blocks uint8 [O, bytes] of weight [O, I], any float dtype. `kind`: a type. Else as `quantize_rows`."""
    rows = weight.float().contiguous().numpy()
    weights = None if importance is None else importance.numpy()
    return torch.from_numpy(quantize_rows(rows, GGMLQuantizationType[kind], weights))


def _by_value(rows: Floats, size: int) -> Floats:
    """Return rows as [N, G, B]. `size`: N."""
    return np.ascontiguousarray(rows.reshape(-1, QK_K // size, size).transpose(2, 1, 0))


def _sums_of_squares(rows: Floats) -> Floats:
    return total(np.ascontiguousarray((rows * rows).T))


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

    def quantize(self, rows: Floats, importance: Floats | None) -> Bytes:
        """Return the blocks [B, bytes].

        A block has the steps of scales and minima, packed scales and minima, fifth bits of codes if any, and low four
        bits.
        """
        x = _by_value(rows, 32)
        if importance is None:
            weights = np.sqrt((x * x).sum(0) / np.float32(len(x))) + np.abs(x)
            offsets = self.first + STEP * np.arange(self.num_candidates, dtype=np.float32)
            scales, minima, codes = fit_affine(x, weights, self.largest, offsets)
            (scale_step, scale_codes), (minimum_step, minimum_codes) = _steps(scales), _steps(minima)
        else:
            squares = 2 * _sums_of_squares(rows.reshape(-1, QK_K)) / np.float32(QK_K)
            weights = np.tile(_by_value(importance, 32), len(rows)) * np.sqrt(squares + x * x)
            scales, minima, codes = fit_affine(x, weights, self.largest, WEIGHTED_OFFSETS)
            sums = weights.sum(0)
            scale_step, scale_codes = fit_multiples(scales, sums, LARGEST_SCALE)
            minimum_step, minimum_codes = fit_multiples(minima, sums, LARGEST_SCALE)
        steps = np.stack((scale_step, minimum_step), axis=1).astype(np.float16)
        rounded_steps = steps.astype(np.float32)
        scales, minima = rounded_steps[:, 0] * scale_codes, rounded_steps[:, 1] * minimum_codes
        refitted = np.clip(np.rint((x + minima) / scales), 0, self.largest)
        rounded = _by_block(np.where(scales == 0, codes, refitted))
        fifth_bits = [np.packbits(rounded >> 4, axis=1, bitorder="little")] if self.largest > 15 else []
        four_bits = rounded[:, 0::2] & 15 | rounded[:, 1::2] << 4
        return _joined(steps.view(np.uint8), _pack_six_bits(scale_codes, minimum_codes), *fifth_bits, four_bits)


def _steps(values: Floats) -> tuple[Floats, Floats]:
    """Return the step [B], and the multiples [8, B] of it that represent nonnegative `values` [8, B]."""
    largest = values.max(0)
    inverse, step = np.where(largest > 0, (LARGEST_SCALE / largest, largest / LARGEST_SCALE), 0)
    return step, np.clip(np.rint(inverse * values), 0, LARGEST_SCALE)


def _pack_six_bits(scales: Floats, minima: Floats) -> Bytes:
    """Return eight scales and eight minima, each [8, B], in 12 bytes [B, 12].

    The top two bits of the last four numbers are in the bytes of the first four.
    """
    numbers = np.stack((scales, minima)).astype(np.uint8)
    first, last = numbers[:, :4], numbers[:, 4:]
    return np.concatenate((*(first | last >> 4 << 6), last[0] & 15 | last[1] << 4)).T


class ThreeBitSuperBlock:
    """Q3_K: 16 groups of 16 values, each value is scale * code, both signed."""

    def quantize(self, rows: Floats, importance: Floats | None) -> Bytes:
        """Return the blocks [B, bytes]: third bits of the codes, low two bits, packed scales, and their step."""
        x = _by_value(rows, 16)
        if importance is None:
            scales, codes = fit_by_exchange(x, x * x, Q3_CODES)
            largest = extreme(scales)
            inverse = -Q3_SCALES / largest
            step = np.where(largest == 0, 0, 1 / inverse)
            multiples = np.where(largest == 0, 0, np.minimum(np.rint(inverse * scales), Q3_SCALES - 1) + Q3_SCALES)
        else:
            squares = 2 * _sums_of_squares(rows.reshape(-1, QK_K)) / np.float32(QK_K)
            weights = np.tile(_by_value(importance, 16), len(rows)) * np.sqrt(squares + x * x)
            scales, codes = fit_signed(x, weights, Q3_CODES)
            step, multiples = fit_signed(scales, weights.sum(0), Q3_SCALES)
        rounded_step = step.astype(np.float16)
        rounded = rounded_step.astype(np.float32) * (multiples - Q3_SCALES)
        refitted = np.clip(np.rint(x / rounded), -Q3_CODES, Q3_CODES - 1) + Q3_CODES
        eighths = _by_block(np.where(rounded == 0, codes, refitted)).reshape(-1, 8, 32)
        third_bits = np.packbits(eighths >> 2, axis=1, bitorder="little")
        quarters = (eighths & 3).reshape(-1, 2, 4, 32)  # [B, half, quarter of the half, value]
        two_bits = np.bitwise_or.reduce(quarters << np.array([[0], [2], [4], [6]], np.uint8), axis=2)
        return _joined(third_bits, two_bits, _pack_multiples(multiples), rounded_step[:, None].view(np.uint8))


def _pack_multiples(multiples: Floats) -> Bytes:
    """Return sixteen numbers of six bits [16, B] in 12 bytes [B, 12]: lower four bits, then upper two bits."""
    numbers = multiples.astype(np.uint8)
    upper = np.bitwise_or.reduce(numbers.reshape(4, 4, -1) >> 4 << np.array([[[0]], [[2]], [[4]], [[6]]], np.uint8))
    return np.concatenate((numbers[:8] & 15 | numbers[8:] << 4, upper)).T


class SignedSuperBlock:
    """Q6_K: 16 groups of 16 values, each value is scale * code, both signed."""

    def quantize(self, rows: Floats, importance: Floats | None) -> Bytes:
        """Return the blocks [B, bytes]: low four bits of the codes, upper two bits, scales, and their step."""
        x = _by_value(rows, 16)
        weights = x * x if importance is None else np.tile(_by_value(importance, 16), len(rows))
        scales, codes = fit_signed(x, weights, Q6_CODES)
        largest = extreme(scales)
        is_zero = np.abs(largest) < SMALLEST
        inverse = -Q6_SCALES / largest
        step = np.where(is_zero, 0, 1 / inverse).astype(np.float16)
        scale_codes = np.where(is_zero, 0, np.minimum(np.rint(inverse * scales), Q6_SCALES - 1))
        scales = step.astype(np.float32) * scale_codes
        refitted = np.clip(np.rint(x / scales), -Q6_CODES, Q6_CODES - 1) + Q6_CODES
        codes = np.where(scales == 0, codes, refitted)
        quarters = _by_block(np.where(is_zero, 0, codes)).reshape(-1, 2, 4, 32)  # [B, half, quarter of the half, value]
        four_bits = quarters[:, :, :2] & 15 | quarters[:, :, 2:] << 4
        two_bits = np.bitwise_or.reduce(quarters >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=2)
        packed_scales = scale_codes.astype(np.int8).T.view(np.uint8)
        return _joined(four_bits, two_bits, packed_scales, step[:, None].view(np.uint8))


@dataclass(frozen=True)
class ShortBlock:
    """A type with blocks of 32 values, with an importance matrix."""

    bits: int
    has_minimum: bool

    def quantize(self, rows: Floats, importance: Floats) -> Bytes:
        """Return the blocks [B, bytes]: scale, minimum if any, fifth bits of codes if any, and low four bits."""
        x = np.ascontiguousarray(rows.reshape(-1, BLOCK).T)
        squares = _sums_of_squares(rows) / np.float32(rows.shape[1])
        squares = squares.repeat(rows.shape[1] // BLOCK)
        weights = np.tile(importance.reshape(-1, BLOCK).T, len(rows)) * np.sqrt(squares + x * x)
        if self.has_minimum:
            scale, minimum, codes = fit_affine(x, weights, np.float32(2**self.bits - 1), WEIGHTED_OFFSETS)
            factors = np.stack((scale, -minimum), axis=1)
        else:
            scale, codes = fit_signed(x, weights, np.float32(2 ** (self.bits - 1)))
            factors = scale[:, None]
        by_block = codes.astype(np.uint8).T
        fifth_bits = [np.packbits(by_block >> 4, axis=1, bitorder="little")] if self.bits == 5 else []
        four_bits = by_block[:, : BLOCK // 2] & 15 | by_block[:, BLOCK // 2 :] << 4
        return _joined(factors.astype(np.float16).view(np.uint8), *fifth_bits, four_bits)


SUPER_BLOCKS: dict[GGMLQuantizationType, AffineSuperBlock | ThreeBitSuperBlock | SignedSuperBlock] = {
    GGMLQuantizationType.Q3_K: ThreeBitSuperBlock(),
    GGMLQuantizationType.Q4_K: AffineSuperBlock(np.float32(15), np.float32(-1), 21),
    GGMLQuantizationType.Q5_K: AffineSuperBlock(np.float32(31), np.float32(-0.5), 16),
    GGMLQuantizationType.Q6_K: SignedSuperBlock(),
}
SHORT_BLOCKS = {
    GGMLQuantizationType.Q4_0: ShortBlock(4, has_minimum=False),
    GGMLQuantizationType.Q4_1: ShortBlock(4, has_minimum=True),
    GGMLQuantizationType.Q5_0: ShortBlock(5, has_minimum=False),
    GGMLQuantizationType.Q5_1: ShortBlock(5, has_minimum=True),
}

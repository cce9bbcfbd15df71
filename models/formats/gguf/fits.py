"""Fit scales and codes to groups of values by search, bit-exactly as ggml-quants.c does.

Each candidate rounds the values to codes, and least squares fit the scale (and the minimum, if the type has one) to the
codes. Candidates and the order of float32 operations are from ggml-quants.c.

Values and their weights are [N, ...]: N values of each group. A sum over N adds values one by one, as ggml does.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

STEP = np.float32(0.1)  # between candidates of `fit_signed` and `fit_multiples`, in codes
SMALLEST = np.float32(1e-15)  # if all magnitudes are below it, the values count as zeros


def fit_affine(x: Floats, weights: Floats, largest: np.float32, offsets: Floats) -> tuple[Floats, Floats, Floats]:
    """Return scales, minima and codes [N, ...] of the best candidate. A value is scale * code - minimum.

    `largest`: largest code; the smallest is 0. A candidate divides the value range into `largest + offset` steps.
    """
    sum_w, sum_wx = total(weights), total(weights * x)
    low, high = np.minimum(x.min(0), 0), x.max(0)
    is_flat = low == high
    inverse = np.where(is_flat, 0, largest / (high - low))
    scale = np.where(is_flat, 0, 1 / inverse)
    best = inverse, low  # with which the best candidate rounds
    codes = _clipped(inverse * (x - low), largest)
    error = _error(weights, scale * codes + low - x)
    for offset in offsets:
        inverse = (offset + largest) / (high - low)
        codes = _clipped(inverse * (x - low), largest)
        weighted = weights * codes
        sum_l, sum_ll, sum_lx = total(weighted), total(weighted * codes), total(weighted * x)
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
    return scale, -low, _clipped(best[0] * (x - best[1]), largest)


def fit_signed(x: Floats, weights: Floats, half: np.float32) -> tuple[Floats, Floats]:
    """Return scales, and the codes [N, ...] of the best candidate, shifted to begin at 0. Codes are -half to half - 1."""
    largest = extreme(x)
    is_zero = np.abs(largest) < SMALLEST
    best_inverse = scale = best = np.zeros_like(largest)
    for i in (0, *range(-9, 0), *range(1, 10)):
        inverse = -(half + STEP * np.float32(i)) / largest
        codes = np.clip(np.rint(inverse * x), -half, half - 1)
        sum_lx, sum_ll = total(weights * x * codes), total(weights * codes * codes)
        is_better = (sum_ll > 0) & ((i == 0) | (sum_lx * sum_lx > best * sum_ll))
        scale = np.where(is_better, sum_lx / sum_ll, scale)
        best = np.where(is_better, scale * sum_lx, best)
        best_inverse = np.where(is_better | (i == 0), inverse, best_inverse)
    codes = np.where(is_zero, 0, np.clip(np.rint(best_inverse * x), -half, half - 1) + half)
    return np.where(is_zero, 0, scale), codes


def fit_multiples(x: Floats, weights: Floats, largest: np.float32) -> tuple[Floats, Floats]:
    """Return steps, and the multiples [N, ...] of them that represent nonnegative values. `largest`: largest multiple."""
    highest = x.max(0)
    is_zero = highest < SMALLEST
    inverse = largest / highest
    difference = x - (1 / inverse) * np.rint(inverse * x)
    error = total(weights * difference * difference)
    for i in (*range(-4, 0), *range(1, 5)):
        candidate = (STEP * np.float32(i) + largest) / highest
        difference = x - (1 / candidate) * np.minimum(np.rint(candidate * x), largest)
        candidate_error = total(weights * difference * difference)
        inverse = np.where(candidate_error < error, candidate, inverse)
        error = np.minimum(error, candidate_error)
    multiples = np.minimum(np.rint(inverse * x), largest)
    sum_lx, sum_ll = total(weights * x * multiples), total(weights * multiples * multiples)
    sum_lx, sum_ll = _exchange(x, weights, multiples, np.float32(0), largest, sum_lx, sum_ll)
    step = np.where(is_zero | ~(sum_ll > 0), 0, sum_lx / sum_ll)
    return step, np.where(is_zero, 0, multiples)


def fit_by_exchange(x: Floats, weights: Floats, half: np.float32) -> tuple[Floats, Floats]:
    """Return scales, and the codes [N, ...], shifted to begin at 0. Codes are -half to half - 1."""
    largest = extreme(x)
    codes = np.clip(np.rint(-half / largest * x), -half, half - 1)
    sum_lx, sum_ll = total(weights * x * codes), total(weights * codes * codes)
    sum_lx, sum_ll = _exchange(x, weights, codes, -half, half - 1, sum_lx, sum_ll)
    is_zero = np.abs(largest) < SMALLEST
    scales = np.where(is_zero | ~(sum_ll > 0), 0, sum_lx / sum_ll)
    return scales, np.where(is_zero, 0, codes + half)


def _exchange(
    x: Floats, weights: Floats, codes: Floats, lowest: np.float32, largest: np.float32, sum_lx: Floats, sum_ll: Floats
) -> tuple[Floats, Floats]:
    """Replace each code in turn by the nearest one for the scale that fits the other codes, if that reduces the error.

    Five passes change `codes`. Returns the sums of weights * x * codes and weights * codes * codes.
    """
    for _ in range(5):
        for value, weight, code in zip(x, weights, codes, strict=True):
            lx, ll = sum_lx - weight * value * code, sum_ll - weight * code * code  # without this value
            changed = np.clip(np.rint(value * ll / lx), lowest, largest)
            is_possible = (lx > 0) & (ll > 0) & (changed != code)
            lx, ll = lx + weight * value * changed, ll + weight * changed * changed
            is_better = is_possible & (lx * lx * sum_ll > sum_lx * sum_lx * ll)
            code[:] = np.where(is_better, changed, code)
            sum_lx, sum_ll = np.where(is_better, lx, sum_lx), np.where(is_better, ll, sum_ll)
    return sum_lx, sum_ll


def total(values: Floats) -> Floats:
    """Return the sums along the first axis, added one by one."""
    one_by_one: Floats = values.sum(0) if values[0].size > 1 else values.cumsum(0)[-1]  # else numpy adds in pairs
    return one_by_one


def extreme(x: Floats) -> Floats:
    """Return the value with the largest magnitude along the first axis; the first one if several are equal."""
    largest: Floats = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
    return largest


def _clipped(codes: NDArray[Any], largest: np.float32) -> NDArray[Any]:
    rounded: NDArray[Any] = np.clip(np.rint(codes), 0, largest)
    return rounded


def _error(weights: Floats, difference: Floats) -> Floats:
    return total(weights * (difference * difference))

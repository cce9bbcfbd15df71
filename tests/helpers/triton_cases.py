"""Shared by the tests of Triton kernels. The kernels run on a GPU if there is one, and in Triton's interpreter
otherwise."""

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.quantize_rows import ActivationFormat
from tests.helpers.cases import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED_BYTES = 227 * 1024  # per program on compute capability 9.0

# Relative to the largest element: rounding of the result, and of the one intermediate result that only a reference
# rounds. float32: sums of a few hundred terms in another order.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

FP8 = torch.float8_e4m3fn
EXPERT_FORMATS: dict[str, tuple[int, torch.dtype, int | None, bool, ActivationFormat | None]] = {
    # bits and dtype of codes, inputs per scale, zero points, activation format
    "w8a16": (8, torch.int8, None, False, None),
    "w8a16 g64": (8, torch.int8, 64, False, None),
    "w4a16": (4, torch.int8, None, False, None),
    "w4a16 g128": (4, torch.int8, 128, False, None),
    "w4a16 g32 zero": (4, torch.int8, 32, True, None),
    "mxfp4": (4, torch.uint8, 32, False, None),
    "nvfp4": (4, torch.uint8, 16, False, None),
    "fp8 weight": (8, FP8, None, False, None),
    "w8a8": (8, torch.int8, None, False, ActivationFormat(torch.int8)),
    "fp8": (8, FP8, None, False, ActivationFormat(FP8)),
    "fp8 blocks": (8, FP8, 128, False, ActivationFormat(FP8, 128)),
}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(result: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Compare within `tolerance`, which is relative to the largest element. NaN equals nothing."""
    assert result.shape == expected.shape
    tolerance = TOLERANCES[result.dtype] if tolerance is None else tolerance
    error = (result.cpu().double() - expected.cpu().double()).abs().amax()
    assert error <= tolerance * expected.abs().amax().double().cpu(), f"off by {error:.3g}"


IsCase = Callable[..., bool]


def covering(
    options: Sequence[Sequence[Any]], strength: int, is_case: IsCase = lambda *values: True
) -> list[tuple[Any, ...]]:
    """Return a few combinations of the options that cover every valid combination of any `strength` options."""
    parts, values = {}, {}
    for places in itertools.product(*(range(len(option)) for option in options)):
        values[places] = tuple(option[place] for option, place in zip(options, places, strict=True))
        if is_case(*values[places]):
            parts[places] = set(itertools.combinations(enumerate(places), strength))
    left, used, chosen = set().union(*parts.values()), Counter(), []
    while left:
        best = max(parts, key=lambda places: (len(parts[places] & left), -sum(used[at] for at in enumerate(places))))
        left -= parts[best]
        used.update(enumerate(best))
        chosen.append(values[best])
    return chosen


def tiers(
    names: str, *options: Sequence[Any], is_case: IsCase = lambda *values: True
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Run a test with every option once; as `long` with every pair of options; as `matrix` with all combinations."""
    marks = {1: (), len(options): pytest.mark.matrix, 2: pytest.mark.long}
    cases = [pytest.param(size, id=f"{size} of {len(options)}", marks=marks[size]) for size in sorted(marks)]

    def decorate(test: Callable[..., None]) -> Callable[[int], None]:
        @functools.wraps(test)
        def run(strength: int) -> None:
            each(names, covering(options, strength, is_case))(test)()

        run.__signature__ = inspect.signature(run, follow_wrapped=False)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("strength", cases)(run)

    return decorate

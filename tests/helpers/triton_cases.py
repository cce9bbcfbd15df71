"""What the comparisons of Triton kernels share. They run on a GPU where there is one, and are interpreted where there is none."""

import torch
from torch import Tensor

from kernels.quantize_rows import ActivationFormat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Of the largest element: rounding of the result, and of the one intermediate result that a reference rounds where its kernel does not.
# float32: sums of a few hundred terms in another order.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

FP8 = torch.float8_e4m3fn
EXPERT_FORMATS: dict[str, tuple[int, torch.dtype, int | None, bool, ActivationFormat | None]] = {
    # bits and dtype of codes, inputs that share a scale, zero points, what rows become
    "w8a16": (8, torch.int8, None, False, None),
    "w8a16 g64": (8, torch.int8, 64, False, None),
    "w4a16": (4, torch.int8, None, False, None),
    "w4a16 g128": (4, torch.int8, 128, False, None),
    "w4a16 g32 zero": (4, torch.int8, 32, True, None),
    "fp8 weight": (8, FP8, None, False, None),
    "w8a8": (8, torch.int8, None, False, ActivationFormat(torch.int8)),
    "fp8": (8, FP8, None, False, ActivationFormat(FP8)),
    "fp8 blocks": (8, FP8, 128, False, ActivationFormat(FP8, 128)),
}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(result: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """`tolerance` is relative to the largest element; NaN is equal to nothing."""
    assert result.shape == expected.shape
    tolerance = TOLERANCES[result.dtype] if tolerance is None else tolerance
    error = (result.cpu().double() - expected.cpu().double()).abs().amax()
    assert error <= tolerance * expected.abs().amax().double().cpu(), f"off by {error:.3g}"

"""round_channels of each instruction set against its reference, to the bit, on any number of threads."""

import torch
from torch import Tensor

from kernels.round_channels import reference, round_channels
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.random_tensors import random
from tests.helpers.ways import compiled

RANGES = {"int4": (-8.0, 7.0), "int4 with zero points": (0.0, 15.0), "int8": (-128.0, 127.0), "fp8": (-448.0, 448.0)}


def rounded(operator: object, shape: tuple[int, int, int], kind: str, is_pruned: bool) -> tuple[Tensor, ...]:
    """What remains of the weights, codes, and errors."""
    channels, num_rounded, outputs = shape
    weights = random(channels, outputs)
    weights[0, 0] = 1e30  # saturates
    factor = random(channels, channels, seed=1) * 0.1 + torch.eye(channels)  # read above the diagonal
    scales = random(num_rounded, outputs, seed=2).abs() * (0.01 if kind == "fp8" else 0.2) + 0.001
    zeros = torch.arange(num_rounded * outputs).view(num_rounded, outputs).remainder(16).to(torch.int8)
    codes = torch.full((num_rounded, outputs), 99, dtype=torch.int8)
    if kind == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    errors, kept = torch.full((num_rounded, outputs), torch.nan), random(num_rounded, outputs, seed=3) > 0
    points = zeros if "zero points" in kind else None
    assert callable(operator)
    operator(weights, factor, scales, points, kept if is_pruned else None, codes, errors, *RANGES[kind])
    return weights, codes.view(torch.int8), errors


@compiled
@each("shape", [(1, 1, 1), (5, 3, 17), (128, 128, 200), (96, 32, 65)])
@each("kind", list(RANGES))
@each("is_pruned", [False, True])
def test_equals_the_reference_to_the_bit(shape: tuple[int, int, int], kind: str, is_pruned: bool) -> None:
    expected = rounded(reference.round_channels, shape, kind, is_pruned)
    for num_threads in (1, 3):
        set_threads(num_threads)
        for actual, wanted in zip(rounded(round_channels, shape, kind, is_pruned), expected, strict=True):
            assert torch.equal(actual, wanted)

"""Integer weights in the form of products' arguments."""

import torch
from torch import Tensor

FORMATS = [  # bits, group size (0: all inputs), whether there are zero points
    *((8, group, False) for group in (0, 32, 64, 128)),
    *((4, group, zeros) for group in (0, 32, 64, 128) for zeros in (False, True)),
]


def make(
    num_outputs: int, num_inputs: int, bits: int, group: int, zeros: bool
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return codes that use the whole range, scales, zero points and the group size."""
    generator = torch.Generator().manual_seed(num_outputs * num_inputs)
    group = min(group or num_inputs, num_inputs)
    groups = -(-num_inputs // group)
    low, high = (-128, 128) if bits == 8 else (0, 16) if zeros else (-8, 8)
    codes = torch.randint(low, high, (num_outputs, num_inputs), dtype=torch.int8, generator=generator)
    scales = torch.rand(num_outputs, groups, generator=generator) + 0.1
    points = torch.randint(0, 17, (num_outputs, groups), dtype=torch.int8, generator=generator) if zeros else None
    return codes, scales, points, group

"""Seeded random tensors."""

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(num_tokens: int, num_inputs: int) -> Tensor:
    """Return activations whose channels differ in size, three of them by a factor of 100."""
    x = random(num_tokens, num_inputs, seed=1) * (random(num_inputs, seed=2) / 2).exp()
    x[:, [3, 17, 40]] *= 100
    return x

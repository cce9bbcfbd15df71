"""Outputs that reveal unwritten elements, and writes beyond their end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

MARGIN = 64  # numbers behind each output


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill outputs with NaN (99 for integers) before they are written, and check that the memory after them is
    unchanged.

    As a decorator below `each` it checks and frees the margins after each value.
    """
    margins: list[tuple[Tensor, float]] = []
    unpoisoned = torch.empty

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
        if torch.device(device).type != "cpu":
            return unpoisoned(*shape, dtype=dtype, device=device)
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        poison = float("nan") if dtype.is_floating_point else 99
        numel = torch.Size(sizes).numel()
        memory = torch.full((numel + MARGIN,), poison, dtype=dtype)
        margins.append((memory[numel:], poison))
        return memory[:numel].view(sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    for margin, poison in margins:
        assert margin.isnan().all() if poison != 99 else (margin == torch.tensor(poison).to(margin.dtype)).all()

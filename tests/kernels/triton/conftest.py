"""Memory that nobody wrote is NaN, or the largest integer, in every comparison here; and Triton's interpreter learns bfloat16."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of 3.6 to 3.9 keeps bfloat16 as its bits in uint16, and `tl.dot` multiplies these integers."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot_of_numbers)

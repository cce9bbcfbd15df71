"""Uninitialised memory is NaN, or the largest integer, in every comparison here; and Triton's interpreter computes as a
GPU does."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

# Before triton is imported, as in tests/helpers/fixtures.py: if pytest is called with a path in this folder, this file
# is the first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tests.helpers.triton_cases import DEVICE  # noqa: E402

FLOATS = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    with np.errstate(all="ignore"):  # warnings that a GPU does not print either
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", autouse=True)
def _language_is_patched_once() -> Iterator[None]:
    """Patch once. The interpreter replaces all of `triton.language` at each call of a device function: two fifths of
    its time. (triton 3.9)"""
    if DEVICE != "cpu":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        yield
        scope.restore()


@pytest.fixture(autouse=True)
def _arithmetic_of_narrow_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct the interpreter's arithmetic. It truncates to bfloat16, treats integers as bfloat16 bits, and in `tl.dot`
    bfloat16 bits as integers; rounding to float8 loses the carry (1.98 becomes 1). A GPU rounds to the nearest, and
    float8 saturates. (triton 3.9)"""
    if DEVICE != "cpu":
        return
    cast_impl, create_dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        numbers = torch.from_numpy(data.copy().view(f"i{data.itemsize}")).view(FLOATS[source])
        if target == tl.float8e4nv:
            numbers = numbers.float().clamp(-448, 448)
        size = target.primitive_bitwidth // 8
        return numbers.to(FLOATS[target]).view(getattr(torch, f"int{8 * size}")).numpy().view(f"u{size}")

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle(
            convert(operand.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )

    def create_dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widen(a), widen(b), *others)

    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            source = cast_impl(self, source, tl.float32)
        return cast_impl(self, source, target)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot_of_numbers)

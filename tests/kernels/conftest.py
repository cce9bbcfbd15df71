"""What tests of the C++ kernels share: every way to compute, and outputs that show what was not written."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import build


def have(name: str) -> None:
    """Skips the test where the kernels for `name` cannot run: no compiler, or not such a CPU."""
    names = list(build.INSTRUCTION_SETS)
    try:
        if names.index(name) < names.index(build.instruction_set()):
            pytest.skip(f"this CPU has no {name}")
        build.load(name)
    except build.NotBuilt as error:
        pytest.skip(str(error))


@pytest.fixture(params=list(build.INSTRUCTION_SETS))
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """The C++ kernels of one instruction set; the fixture sets their number of threads."""
    have(request.param)
    library = build.load(request.param)
    monkeypatch.setattr(build, "library", lambda: library)
    before = library.get_threads()
    yield library.set_threads
    library.set_threads(before)


@pytest.fixture(params=[*build.INSTRUCTION_SETS, "torch"])
def any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C++ kernels of each instruction set, and torch's operators."""
    if request.param != "torch":
        have(request.param)
    monkeypatch.setattr(build, "library", lambda: None if request.param == "torch" else build.load(request.param))
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs are full of NaN (99 for integers) before they are written, and what lies after them must stay so."""
    margins: list[tuple[Tensor, float]] = []

    unpoisoned = torch.empty

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Tensor:
        if torch.device(device).type != "cpu":
            return unpoisoned(*shape, dtype=dtype, device=device)
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        poison = float("nan") if dtype.is_floating_point else 99
        numel = torch.Size(sizes).numel()
        memory = torch.full((numel + 64,), poison, dtype=dtype)
        margins.append((memory[numel:], poison))
        return memory[:numel].view(sizes)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    for margin, poison in margins:
        assert margin.isnan().all() if poison != 99 else (margin == torch.tensor(poison).to(margin.dtype)).all()

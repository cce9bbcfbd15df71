"""A computation recorded once and made again on what its inputs hold by then: on a CPU what a CUDA graph is on a GPU.

A decode step of a small model is 200 short calls, and Python takes longer to make them than they take. Recorded, the library makes its own
in one; torch's operators between them write into the tensors that they made the first time.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import build

T = TypeVar("T")
aten = torch.ops.aten

MAKE_MEMORY = (aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default)
REPEATABLE = {  # the shapes of their results do not depend on the numbers in their inputs: each with the form that writes into a tensor
    aten._to_copy.default: aten._to_copy.out,
    aten.add.Tensor: aten.add.out,
    aten.clone.default: aten.clone.out,
    aten.cos.default: aten.cos.out,
    aten.embedding.default: aten.embedding.out,
    aten.index.Tensor: aten.index.Tensor_out,
    aten.mul.Tensor: aten.mul.out,
    aten.sin.default: aten.sin.out,
}


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.begin_recording.argtypes, library.begin_recording.restype = (), c_void_p
    library.end_recording.argtypes, library.end_recording.restype = (), None
    for function in (library.replay, library.forget):
        function.argtypes, function.restype = (c_void_p,), None
    return library


class Graph:
    """What a computation did, in order. Replayed, it reads its inputs and weights where they were and writes its results where they were."""

    def __init__(self, steps: list[Callable[[], Any]], kept: list[Tensor]) -> None:
        self._steps = steps
        self._kept = kept  # memory that the calls point to

    def replay(self) -> None:
        for step in self._steps:
            step()


def capture(compute: Callable[[], T]) -> tuple[Graph | None, T]:
    """Compute, and record it: the graph, and the result, which a replay writes anew.

    None instead of a graph where there is no library, or where something is computed that cannot be repeated blindly: by an operator that is
    not among `REPEATABLE`, or by one whose shapes depend on numbers.
    """
    library = build.library()
    if library is None:
        return None, compute()
    with _Recorder(library) as recorder:
        result = compute()
    return (None if recorder.obstacle else Graph(recorder.steps, recorder.kept)), result


class _Recorder(TorchDispatchMode):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = _declared(library)
        self.steps: list[Callable[[], Any]] = []
        self.kept: list[Tensor] = []
        self.obstacle: Any = None  # the first operator that cannot be repeated

    def __enter__(self) -> "_Recorder":
        self._begin()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._library.end_recording()

    def _begin(self) -> None:
        calls = self._library.begin_recording()
        step = functools.partial(self._library.replay, calls)
        weakref.finalize(step, self._library.forget, calls)
        self.steps.append(step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.kept.append(result)
        if func.is_view or func in MAKE_MEMORY:
            return result
        if func in REPEATABLE and not _chooses_by_mask(func, args):
            self.steps.append(functools.partial(REPEATABLE[func], *args, **kwargs, out=result))
            self._begin()
        elif self.obstacle is None:
            self.obstacle = func
        return result


def _chooses_by_mask(func: Any, args: Any) -> bool:
    """Whether an index is of bool, so that the shape of what it chooses depends on numbers."""
    return func is aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1])

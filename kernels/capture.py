"""Records a computation on a CPU and replays it on the current contents of its inputs, as a CUDA graph does on a GPU.

A decode step of a small model consists of 200 short calls, and Python needs more time to issue them than they take to
run. In a replay the library runs its own recorded calls in one call. torch's operators between them write into the
tensors that they created while recording.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from kernels import build
from kernels.repeating import repeat_in_library

T = TypeVar("T")
aten = torch.ops.aten

NO_WORK = (  # they allocate memory without writing it, or return a view without the view flag
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
)
REPEATABLE = {  # their output shapes do not depend on input values; operator -> its out= variant
    aten._softmax.default: aten._softmax.out,
    aten._to_copy.default: aten._to_copy.out,
    aten.abs.default: aten.abs.out,
    aten.add.Tensor: aten.add.out,
    aten.amax.default: aten.amax.out,
    aten.amin.default: aten.amin.out,
    aten.arange.default: aten.arange.out,
    aten.arange.start_step: aten.arange.start_out,
    aten.bitwise_not.default: aten.bitwise_not.out,
    aten.bucketize.Tensor: aten.bucketize.Tensor_out,
    aten.cat.default: aten.cat.out,
    aten.clamp.default: aten.clamp.out,
    aten.clone.default: aten.clone.out,
    aten.constant_pad_nd.default: aten.constant_pad_nd.out,
    aten.cos.default: aten.cos.out,
    aten.div.Tensor: aten.div.out,
    aten.embedding.default: aten.embedding.out,
    aten.exp.default: aten.exp.out,
    aten.floor_divide.default: aten.floor_divide.out,
    aten.gather.default: aten.gather.out,
    aten.gt.Scalar: aten.gt.Scalar_out,
    aten.index.Tensor: aten.index.Tensor_out,
    aten.log.default: aten.log.out,
    aten.lt.Scalar: aten.lt.Scalar_out,
    aten.lt.Tensor: aten.lt.Tensor_out,
    aten.masked_fill.Scalar: aten.masked_fill.Scalar_out,
    aten.maximum.default: aten.maximum.out,
    aten.mul.Tensor: aten.mul.out,
    aten.neg.default: aten.neg.out,
    aten.new_full.default: aten.new_full.out,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Scalar_out,
    aten.pow.Tensor_Tensor: aten.pow.Tensor_Tensor_out,
    aten.reciprocal.default: aten.reciprocal.out,
    aten.relu.default: aten.relu.out,
    aten.scatter.value: aten.scatter.value_out,
    aten.sigmoid.default: aten.sigmoid.out,
    aten.sin.default: aten.sin.out,
    aten.sub.Tensor: aten.sub.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.tanh.default: aten.tanh.out,
    aten.topk.default: aten.topk.values,
    aten.where.self: aten.where.self_out,
    aten.zeros_like.default: aten.zeros_like.out,
}


class Graph:
    """The recorded calls of a computation, in order. A replay uses the same addresses of inputs, weights and results."""

    def __init__(self, steps: list[Callable[[], Any]], kept: list[Tensor], read: list[Any]) -> None:
        self._steps = steps
        self._kept = kept, read  # memory that the calls point to
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        self.num_bytes = sum(storages.values())
        """Bytes of the results, which the graph owns."""

    def replay(self) -> None:
        for step in self._steps:
            step()


def capture(compute: Callable[[], T]) -> tuple[Graph | None, T]:
    """Run `compute` and record it. Return the graph and the result; a replay overwrites the result.

    The graph is None if there is no library, or if an operator cannot be replayed: it is not in `REPEATABLE`, or its
    output shape depends on values. The caller must keep the inputs alive and at the same addresses.
    """
    library = build.library()
    if library is None:
        return None, compute()
    recorder = _Recorder(library)
    recorder.begin()
    try:
        with recorder, _NumbersRead(recorder):
            result = compute()
    finally:
        library.end_recording()
    return (None if recorder.obstacle else Graph(recorder.steps, recorder.kept, recorder.read)), result


def repeated(call: Callable[[], None]) -> None:
    """Run an opaque call now and on every replay. Neither torch's operators nor the library's recording cover it as a
    whole.

    The call reads and writes tensors at fixed addresses.
    """
    recorder = _get_current_dispatch_mode()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        call()
    if isinstance(recorder, _Recorder):
        recorder.steps.append(call)
        recorder.begin()


class _Recorder(TorchDispatchMode):
    """Intercepts torch's operators. Ends the current recording of library calls at each operator that must be replayed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch compiles nothing here. Returning True would import torch's compiler, which takes a
        second."""
        return False

    def __init__(self, library: build.Library) -> None:
        super().__init__()
        self._library = library
        self.steps: list[Callable[[], Any]] = []
        self.kept: list[Tensor] = []
        self.read: list[Any] = []  # arguments of torch operators that the library repeats
        self.obstacle: Any = None  # the operator that cannot be replayed

    def begin(self) -> None:
        calls = self._library.begin_recording()
        step = functools.partial(self._library.replay, calls)
        weakref.finalize(step, self._library.free_recording, calls)
        self.steps.append(step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # a composite operator such as contiguous() shows only after decomposition whether it computes
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple | list) else (result,)
        if not func.is_view:  # a view shares memory with an input, a weight or a kept tensor
            self.kept += [result for result in results if isinstance(result, Tensor)]
        if func in REPEATABLE and not _chooses_by_mask(func, args):
            if repeat_in_library(self._library, func, args, kwargs, result):
                self.read.append(args)
            else:
                self.steps.append(_again(func, args, kwargs, results))
                self.begin()
        elif not func.is_view and func not in NO_WORK:
            self.obstacle = func
        return result


class _NumbersRead(TorchFunctionMode):
    """Intercepts reads of values that are not torch operators. A replay would not read them again."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._recorder.obstacle = func
        return func(*args, **(kwargs or {}))


def _again(func: Any, args: Any, kwargs: dict[str, Any], results: Any) -> Callable[[], Any]:
    """Return the call that writes into the results. Arguments that the out= variant lacks (dtype, device) come from the
    results."""
    again = REPEATABLE[func]
    argument_names = {argument.name for argument in again._schema.arguments}
    names = [argument.name for argument in again._schema.arguments if argument.is_out]
    kwargs = {name: value for name, value in kwargs.items() if name in argument_names}
    return functools.partial(again, *args, **kwargs, **dict(zip(names, results, strict=True)))


def _chooses_by_mask(func: Any, args: Any) -> bool:
    """Return whether an index is a mask. The output shape then depends on values."""
    masks = torch.bool, torch.uint8
    return func is aten.index.Tensor and any(index is not None and index.dtype in masks for index in args[1])

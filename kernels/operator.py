"""The declaration of an operator: its implementations (reference, C++, Triton) and its node in torch's graphs."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kernels import build

P = ParamSpec("P")
T = TypeVar("T")


class UnsupportedArguments(Exception):
    """The C++ kernels do not support these arguments. The reference computes instead."""


@dataclass(frozen=True)
class Parts:
    """Flattens an argument type that torch schemas cannot express."""

    take: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]
    """Rebuild the argument from its parts. The parameters have the names and annotations of the parts."""
    is_list: bool = False
    """Whether the argument is a list of such objects. Each part is then a list."""

    @staticmethod
    def of(record: type) -> "Parts":
        """Return the Parts of a dataclass: one part per field."""
        names = [field.name for field in fields(record)]
        return Parts(lambda value: tuple(getattr(value, name) for name in names), record)

    def flatten(self, argument: Any) -> Sequence[Any]:
        return tuple(zip(*map(self.take, argument), strict=True)) if self.is_list else self.take(argument)

    def unflatten(self, parts: Sequence[Any]) -> Any:
        return [self.make(*values) for values in zip(*parts, strict=True)] if self.is_list else self.make(*parts)

    def parameters(self, name: str) -> list[inspect.Parameter]:
        """Return the schema parameters of the argument `name`, one per part, named `name_part`."""
        parts = inspect.signature(self.make).parameters.values()
        types: list[Any] = [Sequence[part.annotation] if self.is_list else part.annotation for part in parts]  # type: ignore[name-defined]
        names = [f"{name}_{part.name}" for part in parts]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(name, kind, annotation=type) for name, type in zip(names, types, strict=True)]


def operator(
    reference: Callable[P, T],
    *,
    fake: Callable[..., T] | None = None,
    check: Callable[..., None] | None = None,
    has_triton: bool = False,
    parts: Mapping[str, Parts] | None = None,
    mutates_args: Sequence[str] = (),
) -> Callable[[Callable[Concatenate[build.Library, P], T]], Callable[P, T]]:
    """Declare an operator. The decorated function calls C++; the returned function takes the same arguments without the
    library.

    In eager mode it first runs `check`, which raises ValueError for arguments that no implementation supports. Then it
    calls the first implementation that applies:

    - on a GPU, the function of this name in the folder's triton.py, if `has_triton`;
    - the decorated function with the C++ kernels, unless it raises UnsupportedArguments;
    - `reference`.

    In a graph it is the node `quintet::<name>`. Its annotations are the schema; `parts` flattens the arguments that a
    schema cannot express, which are positional. It writes only into `mutates_args`, named as in the schema. Its results
    share no memory with its arguments. `fake` returns tensors of the results' shapes and dtypes; the default is
    `reference`.
    """

    def register(function: Callable[Concatenate[build.Library, P], T]) -> Callable[P, T]:
        def dispatcher(to_graph: Callable[..., T] | None) -> Callable[P, T]:
            return _dispatcher(function, reference, check, has_triton, to_graph)

        signature = inspect.signature(function)
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        schema = Schema(signature, parts or {})
        op = _register(function.__name__, schema, dispatcher(None), fake or reference, mutates_args)
        called = dispatcher(lambda *args, **kwargs: op(*schema.flatten(args), **kwargs))
        functools.update_wrapper(called, function)
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.schema = schema  # type: ignore[attr-defined]
        return called

    return register


def _dispatcher(
    function: Callable[Concatenate[build.Library, P], T],
    reference: Callable[P, T],
    check: Callable[..., None] | None,
    has_triton: bool,
    to_graph: Callable[..., T] | None,
) -> Callable[P, T]:
    """Return the function that selects an implementation. `to_graph` is given for calls from Python and None for calls
    from torch's graphs. One function serves both uses: a further function call costs 0.2 us."""
    name, module = function.__name__, function.__module__

    def dispatch(*args: P.args, **kwargs: P.kwargs) -> T:
        if to_graph is not None and is_compiling():
            return to_graph(*args, **kwargs)
        if check is not None:
            check(*args, **kwargs)
        if has_triton and args[0].is_cuda:  # type: ignore[attr-defined]
            result: T = _in_triton(module, name)(*args, **kwargs)
            return result
        library = build.library()
        if library is not None:
            try:
                return function(library, *args, **kwargs)
            except UnsupportedArguments:
                pass
        return reference(*args, **kwargs)

    return dispatch


@functools.cache
def _in_triton(module: str, name: str) -> Callable[..., Any]:
    """Return the function in an operator's triton.py. It is imported at the first call: a process without a GPU does
    not load Triton."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"{module}.triton"), name)
    return function


def _register(
    name: str, schema: "Schema", compute: Callable[..., Any], fake: Callable[..., Any], mutates_args: Sequence[str]
) -> Any:
    """Register `quintet::<name>` with torch. Eager code does not call it, because a call through torch takes 3 us more."""

    def implementation(*flat: Any) -> Any:
        return _contiguous(compute(*schema.unflatten(flat)))

    def without_numbers(*flat: Any) -> Any:
        return _contiguous(fake(*schema.unflatten(flat)))

    implementation.__signature__ = schema.signature  # type: ignore[attr-defined]
    # Not torch.library.custom_op: it adds autograd, which is not needed, and 1 ms per operator to every start.
    qualified = f"quintet::{name}"
    torch.library.define(qualified, torch.library.infer_schema(implementation, mutates_args=mutates_args))
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, without_numbers)
    return getattr(torch.ops.quintet, name)


class Schema:
    """A function's signature with flattened arguments. Trailing arguments may be omitted or passed by name."""

    def __init__(self, signature: inspect.Signature, parts: Mapping[str, Parts]) -> None:
        self._parts = [parts.get(name) for name in signature.parameters]
        parameters = [
            [parameter] if part is None else part.parameters(parameter.name)
            for part, parameter in zip(self._parts, signature.parameters.values(), strict=True)
        ]
        self._counts = [len(group) for group in parameters]
        self._defaults = [parameter.default for parameter in signature.parameters.values()]
        self.signature = signature.replace(parameters=[*chain(*parameters)])

    @property
    def arguments(self) -> list[tuple[Parts | None, list[str]]]:
        """Return, per argument, its Parts (None if it needs none) and its names in the schema."""
        names = iter(self.signature.parameters)
        return [(part, [*islice(names, count)]) for part, count in zip(self._parts, self._counts, strict=True)]

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        # Flattened arguments have no defaults in the schema.
        remaining = self._defaults[len(args) :] if any(self._parts[len(args) :]) else []
        for part, argument in zip(self._parts, (*args, *remaining), strict=False):
            flat += [argument] if part is None else part.flatten(argument)
        return flat

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        args: list[Any] = []
        start = 0
        for part, count in zip(self._parts, self._counts, strict=True):
            if start < len(flat):
                args.append(flat[start] if part is None else part.unflatten(flat[start : start + count]))
            start += count
        return args


def _contiguous(results: Any) -> Any:
    """Return contiguous results. A graph is traced for these strides, whichever implementation runs."""
    if isinstance(results, Tensor):
        return results.contiguous()
    return results if results is None else type(results)(result.contiguous() for result in results)

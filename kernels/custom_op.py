"""Operators as torch's graphs know them: what torch.export and torch.compile trace holds each as one node `quintet::<name>`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Parts:
    """How an argument that is neither a tensor nor a number stands in a schema, which knows nothing else."""

    take: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]
    """An equal argument out of what `take` gave. Its parameters have the names and annotations of the parts."""
    of_each: bool = False
    """Whether the argument is a list of such; then its parts are lists."""

    @staticmethod
    def of(record: type) -> "Parts":
        """A dataclass by its fields."""
        names = [field.name for field in fields(record)]
        return Parts(lambda value: tuple(getattr(value, name) for name in names), record)

    def flatten(self, argument: Any) -> Sequence[Any]:
        return tuple(zip(*map(self.take, argument), strict=True)) if self.of_each else self.take(argument)

    def unflatten(self, parts: Sequence[Any]) -> Any:
        return [self.make(*each) for each in zip(*parts, strict=True)] if self.of_each else self.make(*parts)

    def parameters(self, name: str) -> list[inspect.Parameter]:
        """Of a schema, where those of an argument `name` stand side by side, each as `name_part`."""
        parts = inspect.signature(self.make).parameters.values()
        types: list[Any] = [Sequence[part.annotation] if self.of_each else part.annotation for part in parts]  # type: ignore[name-defined]
        names = [f"{name}_{part.name}" for part in parts]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [inspect.Parameter(each, kind, annotation=type) for each, type in zip(names, types, strict=True)]


def custom_op(
    fake: Callable[..., T], parts: Mapping[str, Parts] | None = None, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Registers a function as `quintet::<its name>`. Its annotations are the schema, with `parts` of the arguments that a schema does not
    know; these are positional. It writes into no arguments but `mutates_args`, named as in the schema; its results share memory with none.

    `fake` takes the same arguments without their numbers and returns what has the same shapes and dtypes: the reference, unless that
    chooses its way by a size. Outside of a graph the function is called as it is: through torch a call takes 3 us more, this way 0.3.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        schema = _Schema(inspect.signature(function), parts or {})

        def implementation(*flat: Any) -> Any:
            return _contiguous(function(*schema.unflatten(flat)))  # type: ignore[call-arg]

        def without_numbers(*flat: Any) -> Any:
            return _contiguous(fake(*schema.unflatten(flat)))

        implementation.__signature__ = schema.signature  # type: ignore[attr-defined]
        # Not torch.library.custom_op: it adds autograd, which nobody wants, and 1 ms for each operator to every start.
        name = f"quintet::{function.__name__}"
        torch.library.define(name, torch.library.infer_schema(implementation, mutates_args=mutates_args))
        torch.library.impl(name, "default", implementation)
        torch.library.register_fake(name, without_numbers)
        op = getattr(torch.ops.quintet, function.__name__)

        @functools.wraps(function)
        def traced_or_called(*args: P.args, **kwargs: P.kwargs) -> T:
            if is_compiling():
                return op(*schema.flatten(args), **kwargs)  # type: ignore[no-any-return]
            return function(*args, **kwargs)

        return traced_or_called

    return register


class _Schema:
    """The arguments of a function, flattened. The last ones may be missing, or have names."""

    def __init__(self, signature: inspect.Signature, parts: Mapping[str, Parts]) -> None:
        self._parts = [parts.get(name) for name in signature.parameters]
        parameters = [
            [parameter] if own is None else own.parameters(parameter.name)
            for own, parameter in zip(self._parts, signature.parameters.values(), strict=True)
        ]
        self._counts = [len(each) for each in parameters]
        self.signature = signature.replace(parameters=[*chain(*parameters)])

    def flatten(self, args: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for own, argument in zip(self._parts, args, strict=False):
            flat += [argument] if own is None else own.flatten(argument)
        return flat

    def unflatten(self, flat: Sequence[Any]) -> list[Any]:
        args: list[Any] = []
        start = 0
        for own, count in zip(self._parts, self._counts, strict=True):
            if start < len(flat):
                args.append(flat[start] if own is None else own.unflatten(flat[start : start + count]))
            start += count
        return args


def _contiguous(results: Any) -> Any:
    """What follows in a graph is made for these strides, whether C++, Triton or torch computes."""
    if isinstance(results, Tensor):
        return results.contiguous()
    return results if results is None else type(results)(result.contiguous() for result in results)

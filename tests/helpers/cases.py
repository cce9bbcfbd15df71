"""A loop inside a test, written as a decorator: many values, one case of the suite."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch


def each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each of `values`, as pytest.mark.parametrize does, but as one case; random numbers start anew for each.

    `names` are arguments of the test, separated by commas; with several of them a value is a tuple. An error says for which value it came.
    Fixtures are made once for all values: give files of different values different names.
    """
    keys, every = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            for value in every:
                torch.manual_seed(0)
                arguments = dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
                try:
                    test(**given, **arguments)
                except Exception as error:
                    error.add_note(f"with {arguments}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate

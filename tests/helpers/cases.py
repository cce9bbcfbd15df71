"""A loop inside a test, as a decorator: many values, one case of the suite."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

SPEEDS = {"quick": pytest.param("quick"), "long": pytest.param("long", marks=pytest.mark.long)}


def each(
    names: str | tuple[str, ...], values: Iterable[Any], quick: Collection[Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each of `values`, as pytest.mark.parametrize does, but as one case.

    `names`: arguments of the test. With several names, a value is a tuple. An error names the value that caused it.
    Each value has its own `tmp_path` and `monkeypatch`, and the same random numbers. Other fixtures are created once
    for all values. The case is skipped if every value is skipped. If some values are `quick`, the remaining values are
    a second case, which is long.
    """
    keys, every = names if isinstance(names, tuple) else tuple(names.replace(",", " ").split()), list(values)
    assert every, "a test without values proves nothing"
    parts = (
        {} if quick is None else {speed: [v for v in every if (v in quick) == (speed == "quick")] for speed in SPEEDS}
    )
    assert all(parts.values()), f"a part without values: {parts}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped: list[BaseException] = []
            chosen = parts[fixtures.pop("speed")] if parts else every
            for number, value in enumerate(chosen):
                arguments = dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
                with _own_fixtures(fixtures, number) as test_fixtures:
                    try:
                        test(**test_fixtures, **arguments)
                    except pytest.skip.Exception as error:
                        skipped.append(error)
                    except BaseException as error:
                        error.add_note(f"with {arguments}")
                        raise
            if len(skipped) == len(chosen):
                raise skipped[0]

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        if parts:
            left.append(inspect.Parameter("speed", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        marked: Callable[..., None] = pytest.mark.parametrize("speed", SPEEDS.values())(run) if parts else run
        return marked

    return decorate


@contextmanager
def _own_fixtures(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        replaced: dict[str, Any] = {}
        if "monkeypatch" in fixtures:
            replaced["monkeypatch"] = monkeypatch
        if "tmp_path" in fixtures:
            folder: Path = fixtures["tmp_path"] / str(number)
            folder.mkdir()
            replaced["tmp_path"] = folder
        if "preempted" in fixtures:
            fixtures["preempted"].clear()
        if "capsys" in fixtures:
            fixtures["capsys"].readouterr()
        if "caplog" in fixtures:
            fixtures["caplog"].clear()
        yield fixtures | replaced

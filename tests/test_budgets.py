"""The budgets of CONTRIBUTING, enforced: lines of files and functions, cases of `make test`. Standard library only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.budget import CASES
from tests.helpers.statements import statements

REPOSITORY = Path(__file__).resolve().parent.parent
TOPS = ("conf", "kernels", "models", "quantization", "pipelines", "tests")
FILES = [REPOSITORY / "run.py", *(file for top in TOPS for file in sorted((REPOSITORY / top).rglob("*.py")))]
SOURCES = sorted(
    file for top in ("kernels", "models") for kind in ("*.cpp", "*.h") for file in (REPOSITORY / top).rglob(kind)
)
FILE, TEST_FILE, FUNCTION, TRITON_KERNEL, SERVER, RUNNER = 500, 600, 50, 120, 3450, 2130  # lines
README, PAGE = 150, 120  # lines of README.md, of a page of docs/
README_LINE = 120  # characters
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def functions(code: str) -> Iterator[Function]:
    return (node for node in statements(code) if isinstance(node, Function))


def lines_allowed(function: Function) -> int:
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return TRITON_KERNEL if is_kernel else FUNCTION


def too_long(code: str) -> list[str]:
    """Return the file's functions with too many lines."""
    lengths = {function: (function.end_lineno or 0) - function.lineno + 1 for function in functions(code)}
    return [f"{function.name}: {length}" for function, length in lengths.items() if length > lines_allowed(function)]


def test_files_and_functions_are_short() -> None:
    sizes = {name(file): len(lines(file)) for file in [*FILES, *SOURCES]}
    long_files = {
        file: size for file, size in sizes.items() if size > (TEST_FILE if file.startswith("tests") else FILE)
    }
    assert not long_files
    long_functions = {
        name(file): functions_too_long
        for file in FILES
        if (functions_too_long := too_long(file.read_text(encoding="utf-8")))
    }
    assert not long_functions
    assert 0 < sum(size for file, size in sizes.items() if Path(file).parent == Path("pipelines/server")) <= SERVER
    runner = [
        line.strip() for file in SOURCES if name(file).startswith("models/exported/runner/") for line in lines(file)
    ]
    assert 0 < sum(bool(line) and not line.startswith("//") for line in runner) <= RUNNER
    readme = lines(REPOSITORY / "README.md")
    assert len(readme) <= README
    assert [line for line in readme if len(line) > README_LINE] == []
    assert [name(page) for page in REPOSITORY.glob("docs/*.md") if len(lines(page)) > PAGE] == []


def test_functions_over_the_budget_are_found() -> None:
    body = "    pass\n" * FUNCTION
    assert too_long("def f():\n" + body) == ["f: 51"]
    assert too_long("class C:\n    async def f():\n" + "        pass\n" * FUNCTION) == ["f: 51"]
    assert too_long("def f():\n" + body.removesuffix("    pass\n")) == []
    assert too_long("@triton.jit(do_not_specialize=COUNTS)\ndef f():\n" + body) == []


def test_make_test_has_few_cases(request: pytest.FixtureRequest) -> None:
    """Count all cases that this run collected."""
    quick = [
        item for item in request.session.items if not {"long", "matrix"} & {mark.name for mark in item.iter_markers()}
    ]
    assert len(quick) <= CASES

"""The budgets of CONTRIBUTING, enforced: lines of files and of functions, and the README's size. Standard library only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TOPS = ("conf", "kernels", "models", "quantization", "pipelines", "runner", "tests")
FILES = [REPOSITORY / "run.py", *(file for top in TOPS for file in sorted((REPOSITORY / top).rglob("*.py")))]
SOURCES = sorted(
    file for top in ("kernels", "runner") for kind in ("*.cpp", "*.h") for file in (REPOSITORY / top).rglob(kind)
)
FILE, TEST_FILE, FUNCTION, TRITON_KERNEL = 400, 600, 50, 120  # lines
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def functions(code: str) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(code)) if isinstance(node, Function))


def lines_allowed(function: Function) -> int:
    is_kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return TRITON_KERNEL if is_kernel else FUNCTION


def too_long(code: str) -> list[str]:
    """Its functions with more lines than they may have."""
    lengths = {each: (each.end_lineno or 0) - each.lineno + 1 for each in functions(code)}
    return [f"{each.name}: {lines}" for each, lines in lengths.items() if lines > lines_allowed(each)]


@pytest.mark.parametrize("file", [*FILES, *SOURCES], ids=name)
def test_a_file_has_at_most_400_lines_and_one_of_tests_600(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= (TEST_FILE if name(file).startswith("tests") else FILE)


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_function_has_at_most_50_lines_and_a_triton_kernel_120(file: Path) -> None:
    assert too_long(file.read_text(encoding="utf-8")) == []


def test_the_server_has_at_most_3000_lines() -> None:
    files = [file for file in FILES if name(file).startswith("pipelines/serve/")]
    assert 0 < sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 3000


def test_the_runner_has_at_most_1000_lines() -> None:
    """Without those that are empty, and those of comments alone."""
    files = [file for file in SOURCES if name(file).startswith("runner/")]
    lines = (line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines())
    assert 0 < sum(bool(line) and not line.startswith("//") for line in lines) <= 1000


def test_what_is_too_long_is_found() -> None:
    body = "    pass\n" * FUNCTION
    assert too_long("def f():\n" + body) == ["f: 51"]
    assert too_long("class C:\n    async def f():\n" + "        pass\n" * FUNCTION) == ["f: 51"]
    assert too_long("def f():\n" + body.removesuffix("    pass\n")) == []
    assert too_long("@triton.jit(do_not_specialize=COUNTS)\ndef f():\n" + body) == []


def test_the_readme_is_read_in_four_minutes() -> None:
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []

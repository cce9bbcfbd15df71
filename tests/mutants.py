"""Mutation testing: break the product's code in one place at a time, and record whether a test fails.

    python tests/mutants.py draw             write tests/mutants.json: 30 mutants of each Python package, 20 of the C++ kernels
    python tests/mutants.py probe TREE LOG   make a copy of the repository, TREE, that writes to LOG which test reaches which mutant
    python tests/mutants.py run NAME LOG TIMES --jobs 2
                                             run the tests that reach each mutant; write the outcomes to tests/mutants.json under NAME

TIMES is a JUnit file of the probed run (`pytest --junit-xml`). Tests that reach a mutant run in the order of their duration, cheapest of
each file first, for at most BUDGET_S seconds of it. Standard library only, apart from pytest.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parent.parent
RECORD = REPOSITORY / "tests" / "mutants.json"
PACKAGES, PER_PACKAGE, CPP_MUTANTS, SEED = ("kernels", "models", "quantization", "pipelines"), 30, 20, 34
KINDS = ("swapped comparison", "off by one", "negated condition", "dropped call", "changed constant")
BUDGET_S = 90  # of the recorded durations of the tests of one mutant
HANGS_S = 300  # a run that takes longer counts as killed
PROBE = """import contextlib
import os

SEEN = set()


def probe(mutant):
    reached = (mutant, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    if reached not in SEEN:
        SEEN.add(reached)
        with contextlib.suppress(OSError), open(f"{LOG}/{os.getpid()}", "a") as log:  # a process of templates opens no file
            log.write(f"{reached[0]}\\t{reached[1]}\\n")
"""
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
CPP_CHANGES = {" < ": " <= ", " <= ": " < ", " + ": " - ", " - ": " + ", " * ": " + ", " && ": " || ", " == ": " != "}
CPP_CHANGES |= {
    " >= ": " > ",
    " > ": " >= ",
    " || ": " && ",
    "++": "--",
    "(0, ": "(1, ",
    " = 0;": " = 1;",
    " + 1": " + 2",
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `old` becomes `new` at the characters `start` to `end` of the file's text."""

    file: str
    function: str
    kind: str
    # among the mutants of this kind in this function; with file and function, the identity that survives moved lines
    index: int
    old: str
    new: str
    start: int = field(compare=False)
    end: int = field(compare=False)
    line: int = field(compare=False)  # a probe is inserted before it; 0 if that is impossible (a Triton kernel)

    @property
    def key(self) -> str:
        return f"{self.file}:{self.function}:{self.kind}:{self.index}"

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


def replacement(node: ast.AST, text: str) -> tuple[str, str] | None:
    """Return the kind of the mutant of `node` and its new text; None if the node has no mutant."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return "swapped comparison", ast.unparse(
                ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
            )
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
            return "off by one", ast.unparse(node.left)
        case ast.Expr(value=ast.Call()):
            return "dropped call", "pass"
        case ast.Constant(value=bool()):
            return "changed constant", repr(not node.value)
        case ast.Constant(value=int() | float()):
            return "changed constant", repr(node.value + 1)
        case ast.Constant(value=str()) if node.value:
            return "changed constant", repr(node.value + "_")
    return None


class Finder(ast.NodeVisitor):
    """Collects the mutants of one file; `text` is its source."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.found = file, text, list[Mutant]()
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()
        self.scope: list[str] = []
        self.statement: ast.stmt | None = None
        self.in_kernel = False
        self.counts: dict[tuple[str, str], int] = defaultdict(int)

    def position(self, line: int, column: int) -> int:
        characters = len(self.lines[line - 1].encode()[:column].decode())
        return self.starts[line - 1] + characters

    def add(self, node: ast.expr | ast.stmt, kind: str, new: str) -> None:
        function = ".".join(self.scope)
        start = self.position(node.lineno, node.col_offset)
        end = self.position(node.end_lineno or 0, node.end_col_offset or 0)
        assert self.statement is not None
        line = 0 if self.in_kernel else self.statement.lineno
        place = self.counts[function, kind]
        self.counts[function, kind] += 1
        self.found.append(Mutant(self.file, function, kind, place, self.text[start:end], new, start, end, line))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._visit_definition(node)
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.AnnAssign | ast.Import | ast.ImportFrom):
            # texts of errors, and types, are not behaviour; positions inside an f-string are wrong before Python 3.12
            pass
        elif isinstance(node, ast.stmt) and self.scope:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                return  # a docstring
            outer = self.statement
            if not self.lines[node.lineno - 1][node.col_offset :].startswith("elif"):
                self.statement = node
            self._visit_mutable(node)
            self.statement = outer
        else:
            self._visit_mutable(node)

    def _visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        outer, was_kernel = self.statement, self.in_kernel
        self.in_kernel |= any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        self.scope.append(node.name)
        for child in node.body:
            if not isinstance(node, ast.ClassDef) or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(child)
        self.scope.pop()
        self.statement, self.in_kernel = outer, was_kernel

    def _visit_mutable(self, node: ast.AST) -> None:
        if self.statement is not None:
            if isinstance(node, ast.If | ast.While | ast.IfExp):
                self.add(node.test, "negated condition", f"(not ({ast.unparse(node.test)}))")
            if (made := replacement(node, self.text)) is not None and isinstance(node, ast.expr | ast.stmt):
                new = f"({made[1]})" if isinstance(node, ast.Compare | ast.BinOp) else made[1]
                self.add(node, made[0], new)
        self.generic_visit(node)


def python_mutants(file: str) -> list[Mutant]:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    finder = Finder(file, text)
    finder.visit(ast.parse(text))
    return finder.found


def cpp_mutants(file: str) -> list[Mutant]:
    """Return changes of single tokens inside indented lines of code."""
    text, mutants = (REPOSITORY / file).read_text(encoding="utf-8"), list[Mutant]()
    at, counts = 0, defaultdict[str, int](int)
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = line.partition("//")[0]
        if code.startswith(" ") and "template" not in code and "using " not in code:
            for old, new in CPP_CHANGES.items():
                for match in re.finditer(re.escape(old), code):
                    kind, start, end = f"{old.strip()} to {new.strip()}", at + match.start(), at + match.end()
                    mutants.append(Mutant(file, code.strip(), kind, counts[code + kind], old, new, start, end, number))
                    counts[code + kind] += 1
        at += len(line)
    return mutants


def draw() -> list[Mutant]:
    """Draw the same number of mutants of each kind; within a kind all are equally likely."""
    chance, drawn = random.Random(SEED), list[Mutant]()
    for package in PACKAGES:
        files = sorted(str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / package).rglob("*.py"))
        mutants = [mutant for file in files for mutant in python_mutants(file)]
        for kind in KINDS:
            drawn += chance.sample([mutant for mutant in mutants if mutant.kind == kind], PER_PACKAGE // len(KINDS))
    sources = sorted(file for kind in ("*.cpp", "*.h") for file in (REPOSITORY / "kernels").rglob(kind))
    names = [str(file.relative_to(REPOSITORY)) for file in sources if "avx512" not in file.name]
    return drawn + chance.sample([mutant for file in names for mutant in cpp_mutants(file)], CPP_MUTANTS)


def recorded() -> tuple[dict[str, dict[str, str]], list[Mutant]]:
    """Return tests/mutants.json and its mutants, located in the current code."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    files = {key.partition(":")[0] for key in record}
    known = {
        mutant.key: mutant
        for file in files
        for mutant in (python_mutants if file.endswith(".py") else cpp_mutants)(file)
    }
    for key in record.keys() - known.keys():
        print(f"gone: {key}")
    return record, [known[key] for key in record if key in known]


def copy_repository(target: Path) -> None:
    """Copy the files that tests read. The real models next to the repository, if any, are linked next to the copy."""
    left_out = shutil.ignore_patterns(".git", ".venv", "outputs", "__pycache__", ".*_cache", "build")
    shutil.copytree(REPOSITORY, target, symlinks=True, ignore=left_out)
    (target / "outputs").mkdir()
    shared, link = REPOSITORY.parent / "shared", target.parent / "shared"
    if shared.is_dir() and not link.exists():
        link.symlink_to(shared)


def write_probes(tree: Path, log: Path) -> None:
    """Copy the repository to `tree`, with a probe before the statement of each Python mutant."""
    copy_repository(tree)
    log.mkdir(parents=True, exist_ok=True)
    (tree / "conf" / "probe.py").write_text(f"LOG = {str(log)!r}\n{PROBE}", encoding="utf-8")
    probes: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for mutant in recorded()[1]:
        if mutant.file.endswith(".py"):
            probes[mutant.file] += [
                (line, mutant.key) for line in ([mutant.line] if mutant.line else launches(mutant.file))
            ]
    for file, places in probes.items():
        lines = (REPOSITORY / file).read_text(encoding="utf-8").splitlines()
        for line, key in sorted(places, reverse=True):
            indent = re.match(" *", lines[line - 1])
            lines.insert(line - 1, f"{indent.group() if indent else ''}__import__('conf.probe').probe.probe({key!r})")
        (tree / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def launches(file: str) -> list[int]:
    """Return the first lines of the functions that launch Triton kernels: the functions of a file that are not
    kernels."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        node.body[-1].lineno
        for node in functions
        if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def chosen_tests(mutant: Mutant, reached: dict[str, set[str]], durations: dict[str, float]) -> list[str]:
    """Return the tests to run, cheapest of each file first, until their durations reach the budget."""
    by_file: dict[str, list[str]] = defaultdict(list)
    tests = reached[mutant.key] if mutant.file.endswith(".py") else tests_of_kernel(mutant.file, durations)
    for test in sorted(tests, key=lambda test_id: durations.get(test_id, 1.0)):
        by_file[test.partition("::")[0]].append(test)
    ranked = sorted(
        (place, durations.get(test, 1.0), test)
        for file_tests in by_file.values()
        for place, test in enumerate(file_tests)
    )
    chosen, spent = list[str](), 0.0
    for _, _, test in ranked:
        if not chosen or spent + durations.get(test, 1.0) <= BUDGET_S:
            chosen.append(test)
            spent += durations.get(test, 1.0)
    return chosen


def tests_of_kernel(file: str, durations: dict[str, float]) -> set[str]:
    """Return the tests of an operator's folder; for a header that several folders include, all tests of kernels."""
    folder = Path(file).parent.name
    names = {test for test in durations if test.startswith("tests/kernels/") and "/triton/" not in test}
    folder_tests = {test for test in names if folder != "kernels" and folder in test.partition("::")[0]}
    return folder_tests or names


def read_durations(times: Path) -> dict[str, float]:
    """Return the seconds of each test by its id."""
    seconds: dict[str, float] = {}
    for case in xml.etree.ElementTree.parse(times).iter("testcase"):
        file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return seconds


def read_log(log: Path) -> dict[str, set[str]]:
    reached: dict[str, set[str]] = defaultdict(set)
    for file in log.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, test = line.partition("\t")
            if test:
                reached[key].add(test)
    return reached


def outcome(mutant: Mutant, tests: list[str], tree: Path) -> str:
    """Run `tests` against the mutant in `tree`: killed, hung, survived, or unreached."""
    if not tests:
        return "unreached"
    file = tree / mutant.file
    original = file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "tests"
        names.write_text("\n".join(tests), encoding="utf-8")
        file.write_text(mutant.apply(original), encoding="utf-8")
        # a .pyc is matched to its source by seconds and size only
        os.utime(file, (time.time(), random.randrange(10**9)))
        try:
            options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
            command = [sys.executable, "-m", "pytest", *options, f"@{names}"]
            environment = {**os.environ, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
            with open(Path(folder) / "output", "w") as output:
                run = subprocess.Popen(
                    command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                try:
                    status = run.wait(HANGS_S)
                except subprocess.TimeoutExpired:
                    status = -1
                finally:
                    with suppress(ProcessLookupError):  # none of its processes is left
                        os.killpg(run.pid, signal.SIGKILL)
        finally:
            file.write_text(original, encoding="utf-8")
        text = (Path(folder) / "output").read_text(encoding="utf-8", errors="replace")
    if status in (0, 1, -1):
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return {0: "survived", 1: f"killed by {first.group(1) if first else '?'}", -1: "killed by its time"}[status]
    return f"killed: pytest exited with {status}"


def run_mutants(name: str, log: Path, times: Path, jobs: int) -> None:
    """Run the tests of every mutant without an outcome under `name`. The record is written after each."""
    record, mutants = recorded()
    reached, durations = read_log(log), read_durations(times)
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for i in range(jobs):
            copy_repository(Path(folder) / str(i))
            trees.put(Path(folder) / str(i))

        def examine(mutant: Mutant) -> None:
            tests, tree = chosen_tests(mutant, reached, durations), trees.get()
            try:
                result = outcome(mutant, tests, tree)
            finally:
                trees.put(tree)
            record[mutant.key][name] = result
            record[mutant.key][f"tests {name}"] = str(len(tests))
            print(f"{mutant.key}: {result}", flush=True)
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

        list(pool.map(examine, [mutant for mutant in mutants if name not in record[mutant.key]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("draw")
    probe = verbs.add_parser("probe")
    probe.add_argument("tree", type=Path)
    probe.add_argument("log", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("name")
    run.add_argument("log", type=Path)
    run.add_argument("times", type=Path)
    run.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.verb == "draw":
        record = {mutant.key: {"old": mutant.old, "new": mutant.new, "line": str(mutant.line)} for mutant in draw()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    elif arguments.verb == "probe":
        write_probes(arguments.tree.resolve(), arguments.log.resolve())
    else:
        run_mutants(arguments.name, arguments.log, arguments.times, arguments.jobs)


if __name__ == "__main__":
    main()

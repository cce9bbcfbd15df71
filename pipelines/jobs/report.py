"""The output of a run: atomically written files, progress, and tables."""

import ctypes
import functools
import gc
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from conf.schema import RunConfig
from conf.support.terminal import escape_line
from pipelines.jobs.run_log import log_in

# rich and torch are imported inside functions: the server's HTTP process runs without them.
if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, TaskID

    from pipelines.engine import Engine
    from pipelines.engine.speculation import DraftCounts

Dump = Callable[[RunConfig, Path], str]
"""Returns the config.yaml that repeats a run, from the run and its output folder."""

LOCK = "run.lock"
REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "hydra-core", "omegaconf")
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: proc(5)
STATUS = Path("/proc/self/status")
LINE_EVERY_S = 5.0  # interval of progress lines without a terminal
# The mean time of so many recent layers estimates the remaining time. Earlier layers do not count, because layers that
# a resumed run only reads are faster.
RECENT_LAYERS = 3


def _process_age_s() -> float | None:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # proc(5): the name may hold spaces
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # another system
        return None


START_S = _process_age_s()  # time for interpreter, config and imports, before any task started


def write_atomically(path: Path, content: Iterable[str | bytes] | bytes) -> None:
    """Write a file by write, fsync, rename: after a crash it is complete or absent."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            parts = [content] if isinstance(content, bytes) else content
            file.writelines(part.encode() if isinstance(part, str) else part for part in parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename durable
    finally:
        os.close(folder)


def write_run(output_dir: Path, config_yaml: str, files: Mapping[str, str | bytes]) -> None:
    """Write config.yaml, environment.json and a task's own files, given by name."""
    output_dir.mkdir(parents=True, exist_ok=True)
    log_in(output_dir)
    write_atomically(output_dir / "config.yaml", [config_yaml])
    write_atomically(output_dir / "environment.json", [json.dumps(environment(), indent=2) + "\n"])
    for name, content in files.items():
        write_atomically(output_dir / name, [content])


def environment() -> dict[str, Any]:
    """Return versions, machine and git revision, for environment.json."""
    import torch

    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git_revision": _git("rev-parse", "HEAD"),
        "git_modified": None
        if (status := _git("status", "--porcelain", "--untracked-files=no")) is None
        else bool(status),
    }


_earlier_peak = 0  # bytes, before the last block of `outside_peak_memory`


def reset_peak_memory() -> None:
    """Reset the peak, so that a sweep's job does not report the peak of earlier jobs.

    Does nothing on an unsupported system.
    """
    global _earlier_peak
    _earlier_peak = 0
    _reset_system_peak()


@contextmanager
def outside_peak_memory(device: "torch.device") -> Iterator[None]:
    """Do not count the memory of the block in the peak of a CPU's process."""
    global _earlier_peak
    peak = peak_memory_bytes(device)
    try:
        yield
    finally:
        _reset_system_peak()
        _earlier_peak = peak


def _reset_system_peak() -> None:
    gc.collect()
    if not CLEAR_REFS.exists():
        return
    # glibc does not return freed memory that is next to small blocks in use. Without malloc_trim it keeps all of 400 MB
    # in tensors of 256 KB.
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_memory_bytes(device: "torch.device") -> int:
    """Return peak bytes: of the GPU since the model was loaded, or of this process since `reset_peak_memory`."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists() and (peak_kib := re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE)):
        return max(_earlier_peak, int(peak_kib[1]) * 1024)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of the process's whole life
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory_of(engine: "Engine") -> int:
    """Return the peak bytes of an engine's process, or with ranks the sum of the peaks of all ranks."""
    return peak_memory_bytes(engine.device) + engine.executor.other_ranks_peak_bytes


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


@functools.cache
def _git(*arguments: str) -> str | None:
    """Run git once per process: all its jobs run the code that was imported."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class ProgressSink(Protocol):
    """Receives the progress of a run's stages."""

    def loaded(self, done: int, total: int) -> None: ...
    def converted(self, done: int, total: int) -> None: ...
    def generated(self, num_rows: int, total_rows: int | None, tokens_per_s: float) -> None: ...
    def scored(self, num_tokens: int, total_tokens: int) -> None: ...
    def quantized(self, num_layers: int, total_layers: int) -> None: ...
    def calibrating(self) -> AbstractContextManager[None]: ...


class NoProgress:
    """A sink that shows nothing."""

    def loaded(self, done: int, total: int) -> None: ...
    def converted(self, done: int, total: int) -> None: ...
    def generated(self, num_rows: int, total_rows: int | None, tokens_per_s: float) -> None: ...
    def scored(self, num_tokens: int, total_tokens: int) -> None: ...
    def quantized(self, num_layers: int, total_layers: int) -> None: ...

    def calibrating(self) -> AbstractContextManager[None]:
        return nullcontext()


NO_PROGRESS = NoProgress()


class _Lines(NoProgress):
    """Prints the progress of a calibration every few seconds, also during a long layer."""

    def __init__(self) -> None:
        self._note = "begins"
        self._ends: deque[float] = deque(maxlen=RECENT_LAYERS + 1)  # of layers

    def loaded(self, done: int, total: int) -> None:
        self._note = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB loaded"

    def quantized(self, num_layers: int, total_layers: int) -> None:
        self._ends.append(time.perf_counter())
        self._note = f"{num_layers} of {total_layers} layers done"
        if num_layers < total_layers and len(self._ends) > 1:
            seconds = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            self._note += f", about {(total_layers - num_layers) * seconds:,.0f} s for the rest"

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        ended, start = threading.Event(), time.perf_counter()

        def tell() -> None:
            while not ended.wait(LINE_EVERY_S):
                print(f"calibrating: {self._note}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

        teller = threading.Thread(target=tell, name="calibrating", daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()


class _Bar(NoProgress):
    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._load = progress.add_task("load", total=None, note="", visible=False)
        self._score = progress.add_task("score", total=None, note="", visible=False)
        self._convert = progress.add_task("convert", total=None, note="", visible=False)
        self._quantize = progress.add_task("quantize", total=None, note="", visible=False)
        self._generate = progress.add_task("generate", total=None, note="", visible=False)

    def loaded(self, done: int, total: int) -> None:
        self._bytes(self._load, done, total)

    def converted(self, done: int, total: int) -> None:
        self._bytes(self._convert, done, total)

    def generated(self, num_rows: int, total_rows: int | None, tokens_per_s: float) -> None:
        of_all = "" if total_rows is None else f" of {total_rows}"
        note = f"{num_rows}{of_all} rows, {tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._generate, completed=num_rows, total=total_rows, note=note, visible=True)

    def scored(self, num_tokens: int, total_tokens: int) -> None:
        note = f"{num_tokens:,} of {total_tokens:,} tokens"
        self._progress.update(self._score, completed=num_tokens, total=total_tokens, note=note, visible=True)

    def quantized(self, num_layers: int, total_layers: int) -> None:
        note = f"{num_layers} of {total_layers} layers"
        self._progress.update(self._quantize, completed=num_layers, total=total_layers, note=note, visible=True)

    def _bytes(self, task: "TaskID", done: int, total: int) -> None:
        note = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        self._progress.update(task, completed=done, total=total, note=note, visible=True)


@contextmanager
def progress_bar() -> Iterator[ProgressSink]:
    """Yield a progress bar on standard error if it is a terminal, else a sink that prints lines during calibration."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        yield _Bar(progress)


def draft_metrics(counts: "DraftCounts") -> dict[str, Any]:
    return {
        "num_drafted_tokens": counts.num_drafted_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "acceptance": counts.acceptance,
    }


def draft_lines(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the printed table's line about draft tokens, if there were any."""
    drafted, accepted = metrics["num_drafted_tokens"], metrics["num_accepted_tokens"]
    return [("drafts", f"{accepted:,} of {drafted:,} tokens accepted")] if drafted else []


def print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {escape_line(value)}")


def print_columns(table: dict[str, list[str]]) -> None:
    """Print a table with headings on standard output, without a width limit if it is not a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    rich_table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading, cells in table.items():
        numbers = all(re.fullmatch(r"-?[\d.,]*(e-?\d+)?", cell) for cell in cells)
        rich_table.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    for row in zip(*table.values(), strict=True):
        rich_table.add_row(*map(escape_line, row))
    console.print(rich_table)

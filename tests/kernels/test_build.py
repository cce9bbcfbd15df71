"""Building and loading the C++ kernels, and their threads."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import build
from kernels.linear import matmul, pack
from kernels.threads import set_threads, threads
from tests.helpers.cases import each
from tests.helpers.ways import compiled, computing, instruction_sets, need

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCT = "import torch; from kernels.linear import matmul, pack; p = pack(torch.ones(20, 8)); print(matmul(torch.ones(1, 8), p).sum())"
NOTHING = 'extern "C" [[gnu::visibility("default")]] void *first_exported() { return nullptr; }'

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)  # gives other Python threads the chance to begin a call


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("name", build.INSTRUCTION_SETS)
def test_kernels_of_an_instruction_set_compute(name: str) -> None:
    """If it is skipped, no other test computes with these kernels either."""
    need(name)
    with computing(name):
        packed = pack(torch.ones(20, 8))
        assert isinstance(build.library(), build.Library)
        assert matmul(torch.ones(1, 8), packed).sum() == 160


def test_without_a_compiler_torch_computes_and_one_warning_says_what_to_do(tmp_path: Path) -> None:
    done = run(f"{PRODUCT}; matmul(torch.ones(1, 8), p)", PATH=str(tmp_path))
    assert done.stdout == "tensor(160.)\n"
    assert done.stderr == (
        "the CPU kernels are off, and plain torch is slower: there is no C++ compiler; install g++ 11 or later, or name one in the "
        "environment variable CXX\n"
    )


def test_an_old_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : fpu sse2\n")
    with pytest.raises(build.NotBuilt, match="this CPU has neither AVX-512 with VNNI and BF16 nor AVX2 with FMA"):
        build.instruction_set()


@each("may_use_tiles", [True, False])
def test_the_best_instruction_set_is_taken(may_use_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linux = SimpleNamespace(syscall=lambda *_: 0 if may_use_tiles else -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: linux)
    amx, avx512, avx2, _ = (" ".join(needed) for needed, _ in build.INSTRUCTION_SETS.values())
    for flags, name in (
        (amx, "amx" if may_use_tiles else "avx512"),
        (f"{avx512} {avx2}", "avx512"),
        (f"{avx2} avx512f", "avx2"),
    ):
        monkeypatch.setattr(Path, "read_text", lambda *_, text=f"flags : {flags}\n", **__: text)
        assert build.instruction_set() == name


def test_two_instruction_sets_in_one_process_have_each_their_functions() -> None:
    names = instruction_sets()
    if len(names) < 2:
        pytest.skip("there are no kernels of two instruction sets")
    addresses = {ctypes.cast(build.load(name).matmul, ctypes.c_void_p).value for name in names}
    assert len(addresses) == len(names)


def test_processes_build_at_once(tmp_path: Path) -> None:
    need("avx2")
    source = tmp_path / "nothing.cpp"
    source.write_text(NOTHING)
    code = f"from kernels import build; build.sources = lambda: [build.Path({str(source)!r})]; print(vars(build.load('avx2')))"
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: run(code, XDG_CACHE_HOME=str(tmp_path)), range(3)))
    assert [process.stdout for process in done] == ["{}\n"] * 3
    assert sorted(process.stderr for process in done) == [
        "",
        "",
        "compiling the kernels for avx2, once: a minute or two\n",
    ]
    made = sorted(path.suffix for path in (tmp_path / "quintet").iterdir())
    assert made == [".lock", ".so"]


def test_source_compiler_flags_and_instruction_set_change_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, compiler = tmp_path / "a.cpp", "/bin/echo"
    source.write_text("1")
    monkeypatch.setattr(build, "sources", lambda: [source])
    names = [
        build.fingerprint(compiler, "avx2"),
        build.fingerprint(compiler, "avx512"),
        build.fingerprint("/bin/true", "avx2"),
    ]
    source.write_text("2")
    names.append(build.fingerprint(compiler, "avx2"))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.append(build.fingerprint(compiler, "avx2"))
    assert len(set(names)) == 5


# --- threads ---


@pytest.fixture
def python_threads_alternate() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("python_threads_alternate")
@compiled
def test_several_python_threads_share_the_pool() -> None:
    set_threads(3)
    library = build.library()
    assert library is not None

    def chunks_seen(num_chunks: int) -> list[int]:
        seen: list[int] = []
        note = WORK(lambda _, chunk: seen.append(chunk))
        for _ in range(200):
            library.run_chunks(ctypes.c_int64(num_chunks), note, None)
        return sorted(seen)

    counts = [7, 40, 41, 60]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(chunks_seen, counts)) == [sorted([*range(count)] * 200) for count in counts]


@pytest.mark.forks
@compiled
def test_a_forked_child_computes_while_its_parent_does() -> None:
    """The child has neither the workers nor the thread that is in the middle of a call."""
    set_threads(3)
    library = build.library()
    assert library is not None
    packed, x = pack(torch.ones(200, 64)), torch.ones(2, 64)
    before = matmul(x, packed)
    begun, forked = threading.Event(), threading.Event()

    @WORK
    def wait(_: object, chunk: int) -> None:
        begun.set()
        forked.wait()

    other = threading.Thread(target=lambda: library.run_chunks(ctypes.c_int64(2), wait, None))
    other.start()
    begun.wait()
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not matmul(x, packed).equal(before)))
    child.start()
    child.join(30)
    child.kill()
    forked.set()
    other.join()
    assert child.exitcode == 0
    assert matmul(x, packed).equal(before)


@compiled
def test_the_calling_thread_keeps_its_cores() -> None:
    """Threads that torch starts later inherit the caller's cores, so the caller must not be left with one core."""
    before = os.sched_getaffinity(0)
    set_threads(2)
    matmul(torch.ones(1, 8), pack(torch.ones(200, 8)))
    assert os.sched_getaffinity(0) == before


@compiled
def test_each_chunk_runs_once_whatever_the_number_of_threads() -> None:
    library = build.library()
    assert library is not None
    for num_threads in (1, 2, 5, 3):
        set_threads(num_threads)
        seen: list[int] = []
        note = WORK(lambda _, chunk, seen=seen: seen.append(chunk))
        for _ in range(20):
            library.run_chunks(ctypes.c_int64(40), note, None)
        assert sorted(seen) == sorted([*range(40)] * 20)


@compiled
def test_another_number_of_threads_for_a_while() -> None:
    set_threads(3)
    library = build.library()
    assert library is not None
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threads(None):
        assert library.get_threads() == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    with threads(2):
        assert library.get_threads() == 2
    assert library.get_threads() == 3
    with pytest.raises(ZeroDivisionError), threads(2):
        print(1 / 0)
    assert library.get_threads() == 3


def test_a_number_of_threads_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="0 threads: give at least 1"):
        set_threads(0)


def test_one_thread_computes_where_linux_tells_no_cores(tmp_path: Path) -> None:
    """Linux reports no cores if the caller's mask is shorter than the machine's maximum."""
    need(build.instruction_set())
    source, without = tmp_path / "without.c", tmp_path / "without.so"
    source.write_text("int sched_getaffinity(int pid, unsigned long size, void *set) { return -1; }\n")
    subprocess.run([build.compiler(), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(without)], check=True)
    code = """
import ctypes
from kernels import build
library, seen = build.library(), []
note = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(lambda _, chunk: seen.append(chunk))
library.run_chunks(ctypes.c_int64(3), note, None)
print(library.get_threads(), seen)
"""
    done = run(code, LD_PRELOAD=str(without))
    assert (done.stdout, done.returncode) == ("1 [0, 1, 2]\n", 0), done.stderr


def test_no_call_waits_for_a_thread_that_does_not_run() -> None:
    """Another process computes on one of the cores (tests/bench/neighbour.py measures its cost)."""
    need(build.instruction_set())
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core: there is no neighbour's core")
    code = f"import os; os.sched_setaffinity(0, {{{cores[1]}}})\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", code])
    try:
        packed, x = pack(torch.ones(256, 256)), torch.ones(1, 256)
        start = time.perf_counter()
        for _ in range(2000):
            matmul(x, packed)
        # about 20 us per call; a call that waits for all threads, as GOMP's do, waits a time slice of 4 ms: 8 s
        assert time.perf_counter() - start < 4
    finally:
        neighbour.kill()
        neighbour.wait()

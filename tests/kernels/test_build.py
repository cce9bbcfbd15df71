"""Building and loading the C++ kernels, and the threads that run them."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import build
from kernels.linear import matmul, pack
from kernels.threads import set_threads, threads
from tests.kernels.conftest import have

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCT = "import torch; from kernels.linear import matmul, pack; p = pack(torch.ones(20, 8)); print(matmul(torch.ones(1, 8), p).sum())"
ONE_FILE = (
    "from kernels import build; "
    "build.sources = lambda: [build.KERNELS / f'{name}.cpp' for name in ('operator', 'threads')]; "  # compile in seconds
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def need_compiler() -> None:
    have("avx2")


def test_without_a_compiler_torch_computes_and_one_warning_says_what_to_do(tmp_path: Path) -> None:
    done = run(f"{PRODUCT}; matmul(torch.ones(1, 8), p)", PATH=str(tmp_path))
    assert done.stdout == "tensor(160.)\n"
    assert done.stderr == (
        "the CPU kernels are off, and plain torch is slower: there is no C++ compiler; install g++ 11 or later, or name one in the "
        "environment variable CXX\n"
    )


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    need_compiler()
    (tmp_path / "file").touch()
    done = run(PRODUCT, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.stdout == "tensor(160.)\n"
    assert "the CPU kernels are off" in done.stderr
    assert "make the folder writable, or name another in the environment variable XDG_CACHE_HOME" in done.stderr


def test_an_error_of_the_compiler_is_shown(tmp_path: Path) -> None:
    need_compiler()
    broken = tmp_path / "broken.cpp"
    broken.write_text("int f() { return nonsense; }")
    code = f"from kernels import build; from pathlib import Path; build.sources = lambda: [Path({str(broken)!r})]; {PRODUCT}"
    done = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout == "tensor(160.)\n"
    assert "failed; g++ 11 or later compiles the kernels. It says:" in done.stderr
    assert "nonsense" in done.stderr
    assert not list(tmp_path.glob("quintet/*.so"))


def test_an_old_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : fpu sse2\n")
    with pytest.raises(build.NotBuilt, match="this CPU has neither AVX-512 with VNNI and BF16 nor AVX2 with FMA"):
        build.instruction_set()


@pytest.mark.parametrize("may_use_tiles", [True, False])
def test_the_best_instruction_set_is_taken(may_use_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_may_use_tiles", lambda: may_use_tiles)
    amx, avx512, avx2, _ = (" ".join(needed) for needed, _ in build.INSTRUCTION_SETS.values())
    for flags, name in (
        (amx, "amx" if may_use_tiles else "avx512"),
        (f"{avx512} {avx2}", "avx512"),
        (f"{avx2} avx512f", "avx2"),
    ):
        monkeypatch.setattr(Path, "read_text", lambda *_, text=f"flags : {flags}\n", **__: text)
        assert build.instruction_set() == name


def test_two_instruction_sets_in_one_process_have_each_their_functions() -> None:
    have("avx512")
    addresses = {ctypes.cast(build.load(name).matmul, ctypes.c_void_p).value for name in ("avx512", "avx2")}
    assert len(addresses) == 2


def test_processes_build_at_once(tmp_path: Path) -> None:
    need_compiler()
    code = f"{ONE_FILE} print(build.load('avx2').get_threads() > 0)"
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: run(code, XDG_CACHE_HOME=str(tmp_path)), range(3)))
    assert [each.stdout for each in done] == ["True\n"] * 3
    assert sorted(each.stderr for each in done) == ["", "", "compiling the kernels for avx2, once: a minute or two\n"]
    made = sorted(path.suffix for path in (tmp_path / "quintet").iterdir())
    assert made == [".lock", ".so"]


def test_what_changes_the_library_changes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


WORK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64
)  # which gives other Python threads a chance to begin a call


@pytest.fixture
def python_threads_alternate() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("python_threads_alternate")
def test_several_python_threads_share_the_pool(compiled: Callable[[int], None]) -> None:
    compiled(3)
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


def test_a_forked_child_computes_while_its_parent_does() -> None:
    """The child has neither the workers nor the thread that is amid a call."""
    need_compiler()
    code = """
import ctypes, os, signal, threading, torch
from kernels import build
from kernels.linear import matmul, pack
from kernels.threads import set_threads
set_threads(3)
p, x = pack(torch.ones(200, 64)), torch.ones(2, 64)
before = matmul(x, p)
begun, forked = threading.Event(), threading.Event()
wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(lambda *_: [begun.set(), forked.wait()] and None)
other = threading.Thread(target=lambda: build.library().run_chunks(ctypes.c_int64(2), wait, None))
other.start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if torch.equal(matmul(x, p), before) else 1)
status = os.waitpid(child, 0)[1]
forked.set()
other.join()
print(torch.equal(matmul(x, p), before), status)
"""
    done = run(code)
    assert (done.stdout, done.stderr, done.returncode) == ("True 0\n", "", 0)


def test_the_calling_thread_keeps_its_cores(compiled: Callable[[int], None]) -> None:
    """Threads that torch starts later inherit the caller's cores: it must not be left with one."""
    before = os.sched_getaffinity(0)
    compiled(2)
    matmul(torch.ones(1, 8), pack(torch.ones(200, 8)))
    assert os.sched_getaffinity(0) == before


def test_each_chunk_runs_once_whatever_the_number_of_threads(compiled: Callable[[int], None]) -> None:
    library = build.library()
    assert library is not None
    for num_threads in (1, 2, 5, 3):
        compiled(num_threads)
        seen: list[int] = []
        note = WORK(lambda _, chunk, seen=seen: seen.append(chunk))
        for _ in range(20):
            library.run_chunks(ctypes.c_int64(40), note, None)
        assert sorted(seen) == sorted([*range(40)] * 20)


def test_another_number_of_threads_for_a_while(compiled: Callable[[int], None]) -> None:
    compiled(3)
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
    """It tells none to who asks with room for fewer than the machine may have."""
    have(build.instruction_set())
    source, without = tmp_path / "without.c", tmp_path / "without.so"
    source.write_text("int sched_getaffinity(int pid, unsigned long size, void *set) { return -1; }\n")
    subprocess.run([build.compiler(), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(without)], check=True)
    done = run(f"{PRODUCT}; from kernels import build; print(build.library().get_threads())", LD_PRELOAD=str(without))
    assert (done.stdout, done.returncode) == ("tensor(160.)\n1\n", 0), done.stderr


def test_no_call_waits_for_a_thread_that_does_not_run() -> None:
    """A neighbour computes on one of the cores (tests/bench/neighbour.py measures what that costs)."""
    have(build.instruction_set())
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
        # about 20 us a call; one that waits for all threads, as GOMP's do, waits a time slice, 4 ms: 8 s
        assert time.perf_counter() - start < 4
    finally:
        neighbour.kill()
        neighbour.wait()

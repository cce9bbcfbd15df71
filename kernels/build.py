"""Compiles the C++ kernels, once for each instruction set and compiler, and loads them. Needs only the standard
library.

`python -m kernels.build` compiles for this CPU.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conf.errors import UserError
from kernels.cache_folder import cache_folder, refuse_foreign, remove_abandoned

log = logging.getLogger(__name__)

KERNELS = Path(__file__).resolve().parent

# Levels of the x86-64 ABI instead of `native`: one cache serves every machine of a cluster, and unusual features of a
# CPU change no result.
# No fast-math, and no contraction of a * b + c into one rounding: the compiler contracts or not depending on how it
# unrolled a loop, so the bits of an element would depend on its index. Kernels that want a fused multiply-add request
# it explicitly.
# Hidden symbols: otherwise a second library in the same process would use the function list of the first.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread")
AVX2, AVX2_FLAGS = {"avx2", "fma", "f16c"}, ("-march=x86-64-v3",)
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "fma", "f16c"}
AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
AMX = {"amx_tile", "amx_int8", "amx_bf16"}
INSTRUCTION_SETS = {  # name, best first -> flags required in /proc/cpuinfo, compiler flags
    "amx": (AVX512 | AMX, (*AVX512_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16")),
    "avx512": (AVX512, AVX512_FLAGS),
    "avx2": (AVX2, AVX2_FLAGS),
    "amx_emulated": (
        AVX2,
        (*AVX2_FLAGS, "-DTILES_IN_CPP"),
    ),  # kernels/tiles.h in plain C++, for tests; never selected, because avx2 precedes it
}
TYPES: dict[str, Any] = {  # by the type letters of kernels/operator.h
    "v": None,
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "?": ctypes.c_bool,
}


class NotBuilt(Exception):
    """The C++ kernels are not available. The message gives the reason and a remedy."""


class Exported(ctypes.Structure):
    """`struct Exported` in kernels/operator.h: a node of the linked list of functions."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("types", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class Library:
    """The C++ functions of one instruction set. Each function is an attribute that takes the arguments of its C++
    declaration."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        library.first_exported.restype = ctypes.c_void_p
        at = library.first_exported()
        while at:
            function = Exported.from_address(at)
            types = [TYPES[letter] for letter in function.types.decode()]
            setattr(self, function.name.decode(), ctypes.CFUNCTYPE(*types)(function.address))
            at = function.next

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no C++ file declares a function {name}")


@functools.cache
def library() -> Library | None:
    """Return the kernels for this CPU, or None after one warning if they are not available. Operators then run in plain
    torch."""
    try:
        return load(instruction_set())
    except NotBuilt as error:
        log.warning("the CPU kernels are off, and plain torch is slower: %s", error)
        return None


def instruction_set() -> str:
    """Return the name of the best instruction set of this CPU. Raises NotBuilt if the CPU supports none of them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NotBuilt(f"they need Linux on x86-64 ({error})") from error
    present = set(next((line for line in lines if line.startswith("flags")), "").split())
    for name, (needed, _) in INSTRUCTION_SETS.items():
        if needed <= present and (name != "amx" or _may_use_tiles()):
            return name
    raise NotBuilt("this CPU has neither AVX-512 with VNNI and BF16 nor AVX2 with FMA; use another machine")


def _may_use_tiles() -> bool:
    """Request permission to use AMX tiles for all threads of this process and its children. gVisor and old kernels
    refuse."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # Linux, Documentation/arch/x86/xstate.rst
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


@functools.cache
def load(name: str) -> Library:
    """Return the kernels for the instruction set `name`. Compiles them if they are not in the cache.

    Raises NotBuilt if they cannot be compiled or stored. Raises UserError if another user could have written the
    library. That is not a NotBuilt, because a slower run in torch would hide it.
    """
    try:
        return Library(compiled(name))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        raise NotBuilt(
            f"{error}; make the folder writable, or name another in the environment variable XDG_CACHE_HOME"
        ) from error


def compiled(name: str) -> Path:
    """Return the path of the library that `load` loads. Raises NotBuilt, UserError, and OSError if the cache is not
    writable."""
    path = library_path(name)
    if not path.exists():
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():  # another process may have compiled it while this one waited
                remove_abandoned(path.parent)
                _compile(compiler(), name, path)
    refuse_foreign(path)
    return path


def library_path(name: str) -> Path:
    """Return the path of the library of an instruction set, which need not exist yet. Raises NotBuilt without a compiler."""
    return cache_folder() / f"kernels-{name}-{fingerprint(compiler(), name)}.so"


def compiler() -> str:
    """Return the path of the C++ compiler. Raises NotBuilt if there is none."""
    path = shutil.which(os.environ.get("CXX", "c++"))
    if path is None:
        raise NotBuilt("there is no C++ compiler; install g++ 11 or later, or name one in the environment variable CXX")
    return path


def sources() -> list[Path]:
    return sorted([*KERNELS.glob("*.cpp"), *KERNELS.glob("*/*.cpp")])


def fingerprint(compiler: str, name: str) -> str:
    """Return a digest of the sources, the flags, and the compiler with its version."""
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    parts = [version, repr((FLAGS, INSTRUCTION_SETS[name][1])).encode()]
    parts += [file.read_bytes() for file in [*sources(), *sorted(KERNELS.glob("**/*.h"))]]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _compile(compiler: str, name: str, path: Path) -> None:
    """Write the library to `path` atomically."""
    print(f"compiling the kernels for {name}, once: a minute or two", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        flags = [compiler, *FLAGS, *INSTRUCTION_SETS[name][1]]
        objects = [f"{folder}/{number}.o" for number in range(len(sources()))]
        commands = [
            [*flags, "-c", str(file), "-o", object_file] for file, object_file in zip(sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # each thread waits for a compiler process
            list(pool.map(run, commands))
        library = Path(folder) / path.name
        run([*flags, "-shared", *objects, "-o", str(library)])
        library.chmod(0o755)  # independent of the umask: `refuse_foreign` rejects files that others can write
        library.replace(path)


def run(command: list[str]) -> None:
    """Run the compiler. Raises NotBuilt with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        error_output = done.stderr.strip()[:2000]
        raise NotBuilt(f"{command[0]} failed; g++ 11 or later compiles the kernels. It says:\n{error_output}")


if __name__ == "__main__":
    try:
        compiled(instruction_set())
    except (NotBuilt, OSError, UserError) as error:  # a run without the kernels prints the same warning
        print(error, file=sys.stderr)

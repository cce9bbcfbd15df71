"""Compiles the C++ kernels, once for each instruction set and compiler, and loads them. Needs no package but the standard library.

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

# Levels of the x86-64 ABI and not `native`: one cache serves every machine of a cluster, and a CPU's odd features change no result.
# No fast-math, and no contraction of a * b + c into one rounding: where the compiler does that depends on how it unrolled a loop, so an
# element's bits would depend on its place. Kernels that want a fused multiply-add say so.
# Hidden symbols: else the second library that a process loads would use the first one's list of functions.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread")
AVX2, AVX2_FLAGS = {"avx2", "fma", "f16c"}, ("-march=x86-64-v3",)
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "fma", "f16c"}
AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
AMX = {"amx_tile", "amx_int8", "amx_bf16"}
INSTRUCTION_SETS = {  # name, best first -> what /proc/cpuinfo must list, what the compiler is told
    "amx": (AVX512 | AMX, (*AVX512_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16")),
    "avx512": (AVX512, AVX512_FLAGS),
    "avx2": (AVX2, AVX2_FLAGS),
    "amx_emulated": (
        AVX2,
        (*AVX2_FLAGS, "-DTILES_IN_CPP"),
    ),  # kernels/tiles.h in plain C++: for tests, for no CPU has it as its best
}
TYPES: dict[str, Any] = {  # by the letters of kernels/operator.h
    "v": None,
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "?": ctypes.c_bool,
}


class NotBuilt(Exception):
    """Why there are no fast kernels, and what to do about it."""


class Exported(ctypes.Structure):
    """`struct Exported` in kernels/operator.h: one function, and a pointer to the next."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("types", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class Library:
    """The C++ functions of one instruction set, each an attribute that takes the arguments of its declaration."""

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
    """Return the kernels for this CPU; None, after one warning, where they cannot be had: then the operators run in plain torch."""
    try:
        return load(instruction_set())
    except NotBuilt as error:
        log.warning("the CPU kernels are off, and plain torch is slower: %s", error)
        return None


def instruction_set() -> str:
    """Return the name of the best instruction set that this CPU has. Raises NotBuilt if it has none."""
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
    """Ask Linux for the use of AMX's tiles, for all threads of this process and its children: it refuses under gVisor, or if it is old."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # Linux, Documentation/arch/x86/xstate.rst
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


@functools.cache
def load(name: str) -> Library:
    """Return the kernels for the instruction set `name`, compiled if the cache does not hold them.

    Raises NotBuilt where they cannot be compiled or kept, and UserError where another user could have put them there: a slower run would
    hide that.
    """
    try:
        return Library(compiled(name))
    except (OSError, RuntimeError) as error:  # RuntimeError: of a user who has no home
        raise NotBuilt(
            f"{error}; make the folder writable, or name another in the environment variable XDG_CACHE_HOME"
        ) from error


def compiled(name: str) -> Path:
    """Return the file of the library that `load` loads. Raises NotBuilt, UserError, and OSError where the cache cannot be written."""
    path = cache_folder() / f"kernels-{name}-{fingerprint(compiler(), name)}.so"
    if not path.exists():
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():  # another process may have built it meanwhile
                remove_abandoned(path.parent)
                _compile(compiler(), name, path)
    refuse_foreign(path)
    return path


def compiler() -> str:
    """Return the path of the C++ compiler. Raises NotBuilt where there is none."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        raise NotBuilt("there is no C++ compiler; install g++ 11 or later, or name one in the environment variable CXX")
    return found


def sources() -> list[Path]:
    return sorted([*KERNELS.glob("*.cpp"), *KERNELS.glob("*/*.cpp")])


def fingerprint(compiler: str, name: str) -> str:
    """Return a digest of what the library is built from: sources, flags, and the compiler with its version."""
    version = subprocess.run([compiler, "--version"], capture_output=True).stdout
    parts = [version, repr((FLAGS, INSTRUCTION_SETS[name][1])).encode()]
    parts += [file.read_bytes() for file in [*sources(), *sorted(KERNELS.glob("**/*.h"))]]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _compile(compiler: str, name: str, path: Path) -> None:
    """Write the library to `path`, all of it or nothing."""
    print(f"compiling the kernels for {name}, once: a minute or two", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        flags = [compiler, *FLAGS, *INSTRUCTION_SETS[name][1]]
        objects = [f"{folder}/{number}.o" for number in range(len(sources()))]
        commands = [[*flags, "-c", str(file), "-o", made] for file, made in zip(sources(), objects, strict=True)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # which wait for as many compilers
            list(pool.map(run, commands))
        made = Path(folder) / path.name
        run([*flags, "-shared", *objects, "-o", str(made)])
        made.chmod(0o755)  # whatever the umask: what others can write is refused later
        made.replace(path)


def run(command: list[str]) -> None:
    """Run the compiler. Raises NotBuilt with what it says where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip()[:2000]
        raise NotBuilt(f"{command[0]} failed; g++ 11 or later compiles the kernels. It says:\n{said}")


if __name__ == "__main__":
    try:
        compiled(instruction_set())
    except (NotBuilt, OSError, UserError) as error:  # the run says what it does without them
        print(error, file=sys.stderr)

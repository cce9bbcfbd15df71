"""Commands of this interpreter are forked from a process that has imported torch, which takes 2 s of CPU time per
start.

After `install`, subprocess does this for `python run.py ...`, `python -m MODULE ...` and `python -c CODE ...`.
subprocess in the children does it too: ranks and engines are forked. A child is a child of the caller, like a started
process, so the kernel reports its end to the caller. No module of the product is imported before the fork. Differences
to a start: MODULES are already loaded, the hash seed is the server's, memory is shared with the server, and a traceback
begins in this file. Tests for which these matter use `true_starts`.
"""

import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from types import ModuleType
from typing import Any, NamedTuple

MODULES = ("torch", "torch.export", "hydra", "tokenizers", "safetensors", "fastapi", "uvicorn", "prometheus_client")
# read by the interpreter and by MODULES
READ_ONCE = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "LC_", "LANG", "TORCH_LOGS", "TORCH_CPP")
FLAGS = ("-P", "-u")
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000  # linux/sched.h
PR_GET_TID_ADDRESS = 40  # linux/prctl.h
TITLE_LENGTH = 1 << 13
SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


class Request(NamedTuple):
    """The process that a child becomes."""

    command: list[str]
    cwd: str
    environment: dict[bytes, bytes]
    fds: list[int]
    """The descriptors' numbers in the child."""
    new_session: bool
    group: int
    blocked: set[int]
    ignored: set[int]
    cpus: set[int]


class Client:
    """Requests processes from a server."""

    def __init__(self, channel: socket.socket) -> None:
        self.forks = True
        self._channel = channel
        self._turn = threading.Lock()
        self._read_once = read_once(os.environb)
        self._start = subprocess._fork_exec  # type: ignore[attr-defined]
        subprocess._fork_exec = self.fork_exec  # type: ignore[attr-defined]

    def fork_exec(
        self,
        arguments: Sequence[Any],
        executables: Sequence[bytes],
        close_fds: bool,
        kept: Sequence[int],
        cwd: Any,
        variables: Sequence[bytes] | None,
        *rest: Any,
    ) -> int:
        """Return the id of a new process. It is forked if that is equivalent, else started."""
        in_read, _, _, out_write, _, error_write, _, failure, restores, new_session, group, *owner, umask, before, _ = (
            rest
        )
        command = [os.fsdecode(argument) for argument in arguments]
        environment = dict(os.environb if variables is None else (variable.split(b"=", 1) for variable in variables))
        plain = close_fds and restores and owner == [None, None, None] and umask == -1 and before is None
        if not (self.forks and plain and is_forked(command) and read_once(environment) == self._read_once):
            return int(self._start(arguments, executables, close_fds, kept, cwd, variables, *rest))
        streams = [fd if fd >= 0 else number for number, fd in enumerate((in_read, out_write, error_write))]
        inherited = [fd for fd in kept if fd != failure]
        with self._turn:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                request = Request(
                    command,
                    os.path.join(os.getcwd(), os.fsdecode(cwd or "")),
                    environment,
                    [0, 1, 2, *inherited],
                    new_session,
                    group,
                    set(blocked),
                    {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN},
                    os.sched_getaffinity(0),
                )
                content = pickle.dumps(tuple(request))
                socket.send_fds(self._channel, [len(content).to_bytes(8, "little")], streams + inherited)
                self._channel.sendall(content)
                pid = int.from_bytes(self._channel.recv(8), "little")
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if pid == 0:
            raise OSError("the fork server has ended")
        return pid


client: Client | None = None


def install() -> None:
    """Install a server, which imports MODULES at the first request, and patch subprocess to use it. Does nothing on
    systems other than Linux."""
    global client
    if SYS_CLONE is None:
        return
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", __file__, str(theirs.fileno()), " " * TITLE_LENGTH]
    # The threads that OpenBLAS starts on import would be missing in a child.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    client = Client(ours)


@contextmanager
def true_starts() -> Iterator[None]:
    """Start commands normally within the block."""
    if client is None:
        yield
        return
    client.forks = False
    try:
        yield
    finally:
        client.forks = True


def is_forked(command: list[str]) -> bool:
    _, words = split(command)
    known = words[:1] in (["-c"], ["-m"]) or os.path.basename((words or [""])[0]) == "run.py"
    return command[0] == sys.executable and known


def split(command: list[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter's flags, and the code that it runs with its arguments."""
    flags = [*takewhile(FLAGS.__contains__, command[1:])]
    return flags, command[1 + len(flags) :]


def read_once(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the environment variables that a server has already read and a child does not read again."""
    begins = tuple(begin.encode() for begin in READ_ONCE)
    return {name: value for name, value in environment.items() if name.startswith(begins) and name != b"PYTHONPATH"}


def serve(channel: socket.socket) -> tuple[Request, list[int]]:
    """Fork one child per request. Returns in each child, with its request and the descriptors that came with it."""
    while True:
        size, fds, _, _ = socket.recv_fds(channel, 8, 64)
        if not size:
            os._exit(0)
        content = bytearray()
        while len(content) < int.from_bytes(size, "little"):
            content += channel.recv(1 << 16)
        for module in MODULES:
            with suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
        pid = fork_sibling()
        if pid == 0:
            return Request(*pickle.loads(content)), fds
        for fd in fds:
            os.close(fd)
        channel.sendall(pid.to_bytes(8, "little"))


def fork_sibling() -> int:
    """Fork as os.fork does, except that the child's parent is the parent of this process."""
    assert (
        len(os.listdir("/proc/self/task")) == 1
    )  # the C library's part of a fork, which is for several threads, is left out
    libc, number = ctypes.PyDLL(None), ctypes.c_void_p()  # where the C library keeps the thread id
    libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(number))
    flags = ctypes.c_ulong(CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(libc.syscall(SYS_CLONE, flags, None, None, number, number))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def become(request: Request, fds: list[int], channel: socket.socket) -> None:
    """Give this process the state of a started process before it runs the command's code. `channel`: to the server of
    its own children."""
    beyond = max(*request.fds, *fds, channel.fileno()) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in (channel.fileno(), *fds)]
    channel.close()
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved[1:], request.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    if request.new_session:
        os.setsid()
    if request.group >= 0:
        os.setpgid(0, request.group)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environb.update(request.environment)
    time.tzset()
    os.sched_setaffinity(0, request.cpus)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(fd, "w" if fd else "r", closefd=False)
        is_direct = fd > 0 and "-u" in split(request.command)[0]
        stream = raw if is_direct else io.BufferedWriter(raw) if fd else io.BufferedReader(raw)
        new = type(old)(stream, old.encoding, old.errors, "\n" if fd else None, fd == 2 or os.isatty(fd), is_direct)
        new.mode = old.mode
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.modules["numpy"].random.seed()
    show(request.command)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # skips the destructors of the server's C++ libraries, which take 0.2 s
    Client(socket.socket(fileno=moved[0]))
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def show(command: list[str]) -> None:
    """Write the command to the memory that /proc/PID/cmdline shows. TITLE_LENGTH is its size."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])  # proc(5): arg_start, arg_end
    title = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, title.ljust(end - begin, b"\0"), end - begin)


def run(command: list[str]) -> None:
    """Run the code that the interpreter would run for this command line."""
    flags, (kind, *words) = split(command)
    is_file = kind not in ("-c", "-m")
    sys.orig_argv[:] = command
    sys.argv[:] = [kind, *(words if is_file else words[1:])]
    first = os.path.dirname(os.path.abspath(kind)) if is_file else os.getcwd() if kind == "-m" else ""
    python_path = os.environ.get("PYTHONPATH")
    sys.path[:0] = [*([] if "-P" in flags else [first]), *(python_path.split(os.pathsep) if python_path else [])]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = os.path.abspath(kind)
        with open(kind, "rb") as file:
            exec(compile(file.read(), main.__file__, "exec"), main.__dict__)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # also for children, until they become their command
    its_end = socket.socket(fileno=int(sys.argv[1]))
    while True:
        its_request, its_fds = serve(its_end)
        its_end.close()
        to_server, its_end = socket.socketpair()
        if os.fork():  # the other process serves this one
            break
        to_server.close()
        for descriptor in its_fds:
            os.close(descriptor)
    its_end.close()
    become(its_request, its_fds, to_server)
    run(its_request.command)

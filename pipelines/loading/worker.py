"""The process of a worker rank: it loads its shard of the model, then runs rank 0's operations.

It reads no rows and writes no files. It ends when rank 0 ends, for any reason.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress

from conf.errors import UserError
from conf.support.terminal import escape_control_chars
from pipelines.ranks.launch import Joined, gpu_of, joined
from pipelines.ranks.messages import Channel, Gone, readable
from pipelines.ranks.rendezvous import join, listen

BEAT_S = 1.0
LATE_S = 10.0  # for rank 0's first message, before a notice is printed
SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h


def main() -> None:
    """Run as a rank that rank 0 has started: `python -m pipelines.loading.worker FD PARENT`."""
    fd, parent = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        sys.exit(1)
    follow(Channel(socket.socket(fileno=fd)))


def followed() -> bool:
    """Run a worker rank and return True, if torchrun or srun started this process as a worker rank.

    Returns False on rank 0 and outside a launcher. Rank 0 listens from here on. If rank 0 ends, even because of a
    mistyped setting, the connected workers end too.
    """
    launched = joined(os.environ)
    if launched is None:
        return False
    if launched.rank == 0:
        listen(launched)
        return False
    follow(join(launched), launched)
    return True


def follow(channel: Channel, launched: Joined | None = None) -> None:
    """Run rank 0's operations until it closes the channel.

    `launched`: place in a launcher's job; None: rank 0 started this process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all ranks by a terminal or launcher; rank 0 handles them
        signal.signal(number, signal.SIG_IGN)
    has_begun, has_ended = threading.Event(), threading.Event()
    threading.Thread(target=_beat, args=(channel, has_begun, has_ended), daemon=True).start()
    with suppress(Gone):
        if launched is not None and not readable([channel], LATE_S):
            reason = "it finds, downloads or calibrates the model first"
            print(
                f"rank {launched.rank} waits for rank 0, which has not begun to load: {reason}",
                file=sys.stderr,
                flush=True,
            )
        start, _ = channel.receive()
        has_begun.set()
        if launched is not None:
            start |= {"num_local": launched.num_local, "local_rank": launched.local_rank}
            start["cores"] = start["cores"] or launched.cores(os.sched_getaffinity(0))
        try:
            os.sched_setaffinity(0, start["cores"])  # before torch and the kernels count CPUs
            if start["num_gpus"]:
                gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(start["local_rank"], start["num_gpus"], gpus)
            from pipelines.loading.rank_worker import run_worker

            run_worker(channel, start)
        except Exception as error:
            if isinstance(error, Gone):
                raise
            if not isinstance(error, UserError):
                channel.send({"log": escape_control_chars(traceback.format_exc())})
            channel.send({"error": _error_line(start["name"], error)})
            sys.exit(1)
    has_ended.set()


def _error_line(name: str, error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    print(escape_control_chars(traceback.format_exc()), end="", file=sys.stderr, flush=True)
    return f"{name} failed: {type(error).__name__}: {error}"


def _beat(channel: Channel, has_begun: threading.Event, has_ended: threading.Event) -> None:
    """Send rank 0 heartbeats, and end this process when rank 0 has ended, whatever it is doing.

    Sends nothing before rank 0's first message, because rank 0 may not read for hours. After rank 0's last message this
    process may end slowly.
    """
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    while not poll.poll(BEAT_S * 1000):
        if not has_begun.is_set():
            continue
        try:
            channel.send({"beat": time.monotonic()})
        except Gone:
            break
    os._exit(0 if has_ended.is_set() else 1)


if __name__ == "__main__":
    main()

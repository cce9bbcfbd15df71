"""Rank 0's side of the other ranks: it tells them what to compute, and notices when one is lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from conf.terminal import escape_control_chars
from kernels.collectives import RankFailed
from pipelines.interrupt import RankLost
from pipelines.ranks.messages import Channel, Gone, Header, Message, Silent, readable
from pipelines.ranks.rank_context import RankContext
from pipelines.run_log import log_of_rank

T = TypeVar("T")

LOOK_S = 0.2  # between two looks at what may have failed
GRACE_S = 3.0  # for the run to end by itself once a rank is lost
END_S = 2.0  # for a rank to end once its socket is closed, and for Python once its main thread has ended
CLOSE_S = 10.0  # for the main thread to end once the ranks have


@dataclass
class Worker:
    """Another rank's process as rank 0 watches it: its channel, its answers, and when it was last heard."""

    rank: int
    name: str
    channel: Channel
    process: "subprocess.Popen[bytes] | None"
    """None where somebody else has started it."""
    answers: "SimpleQueue[Message]" = field(default_factory=SimpleQueue)
    heard_at: float = field(default_factory=time.monotonic)

    def how_it_ended(self) -> str:
        """Return what became of a process that has closed its socket."""
        if self.process is None:
            return "has ended"
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        if code >= 0:
            return f"ended with exit code {code}"
        why = ", out of memory?" if -code == signal.SIGKILL else ""
        name = next((each.name for each in signal.Signals if each == -code), "of real time")
        return f"was ended by signal {-code} ({name}{why})"

    def end(self) -> None:
        """Ask the process to end, and see to it that it does."""
        with suppress(Gone):
            self.channel.send({"op": "end"})
            self.channel.wait_for_end(END_S)
        self.channel.close()
        if self.process is None:
            return
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # also one that is stopped
            self.process.wait()


class Workers:
    """The other ranks of a run, and the thread that watches over them."""

    def __init__(self, workers: list[Worker], context: RankContext, heartbeat_s: float) -> None:
        """`heartbeat_s`: how long a rank may be silent."""
        self.context = context
        self._workers = workers
        self._heartbeat_s = heartbeat_s
        self._silence = f"has been silent for {heartbeat_s:g} s"
        self._lost: str | None = None
        self._closed, self._all_ended = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        """Return the processes of the workers that this process has started."""
        return [worker.process for worker in self._workers if worker.process is not None]

    def tell(self, header: Header, payload: bytes | memoryview = b"", ranks: range | None = None) -> None:
        """Send a message to these ranks, None: to every one. Raises RankLost."""
        for worker in self._workers:
            if ranks is None or worker.rank in ranks:
                with suppress(Gone):  # the watcher says why
                    worker.channel.send(header, payload)
        self.check()

    def meanwhile(self, compute: Callable[[], T]) -> T:
        """Return what rank 0 computes while the others do what they were told. Raises RankLost where that does not count."""
        try:
            result = compute()
        except BaseException:
            self.check()
            self.abort()  # the others may wait for this rank
            raise
        self.check()
        return result

    def answers(self) -> list[Header]:
        """Wait for one message of each rank, in their order. Raises RankLost."""
        return [self._answer(worker)[0] for worker in self._workers]

    def answer_of(self, rank: int) -> Message:
        """Wait for a message of this rank, which is not rank 0. Raises RankLost."""
        return self._answer(self._workers[rank - 1])

    def _answer(self, worker: Worker) -> Message:
        while True:
            self.check()
            with suppress(Empty):
                return worker.answers.get(timeout=LOOK_S)

    def check(self) -> None:
        """Raise RankLost where a rank is lost."""
        try:
            self.context.check()
        except RankFailed:
            end = time.monotonic() + GRACE_S
            while self._lost is None and time.monotonic() < end:  # a rank that fails aborts first, and then says why
                time.sleep(LOOK_S)
            self._lost = self._lost or "another rank has failed"
        if self._lost is not None:
            raise RankLost(self._lost)

    def abort(self) -> None:
        """End the step that the other ranks are in: what they compute does not count."""
        self.context.abort()

    def close(self) -> None:
        """End the other ranks."""
        if not self._closed.is_set():
            self._closed.set()
            self.context.abort()
            for worker in self._workers:
                worker.end()
            self._all_ended.set()

    def _watch(self) -> None:
        """Take messages until the first rank is lost. Then see to it that the run ends."""
        looked_at = time.monotonic()
        while self._lost is None and not self._closed.is_set():
            ready = readable([worker.channel for worker in self._workers], LOOK_S)
            now = time.monotonic()
            was_stopped = now - looked_at > self._heartbeat_s / 2  # as by Ctrl-Z, and the others with it
            looked_at = now
            for worker in self._workers:
                if worker.channel in ready:
                    self._take(worker)
                elif was_stopped:
                    worker.heard_at = now
                elif now - worker.heard_at > self._heartbeat_s:
                    self._lose(f"{worker.name} {self._silence}")
        if self._lost is not None:
            self._see_to_the_end()

    def _see_to_the_end(self) -> None:
        """End this process by force where it does not end by itself."""
        if not self._closed.wait(GRACE_S):
            print(escape_control_chars(f"error: {self._lost}"), file=sys.stderr, flush=True)
            for worker in self._workers:
                if worker.process is not None:
                    worker.process.kill()
            os._exit(1)
        self._all_ended.wait()  # which may be in Python's end, where the main thread counts as ended
        end = time.monotonic() + CLOSE_S
        while threading.main_thread().is_alive():  # `join` would hold its lock, which Python's end wants
            if time.monotonic() > end:  # it has other work
                return
            time.sleep(LOOK_S)
        time.sleep(END_S)  # Python's end waits for a thread in which gloo waits for the lost rank
        sys.stdout.flush()
        os._exit(1)

    def _take(self, worker: Worker) -> None:
        try:
            header, content = worker.channel.receive(self._heartbeat_s)
        except Gone as error:
            if not self._closed.is_set():
                self._lose(f"{worker.name} {self._silence if isinstance(error, Silent) else worker.how_it_ended()}")
            return
        worker.heard_at = time.monotonic()
        if "error" in header:
            self._lose(str(header["error"]))
        elif "log" in header:
            log_of_rank(worker.rank, str(header["log"]))
        elif "beat" not in header:
            worker.answers.put((header, content))

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self.context.abort()
        for worker in self._workers:
            worker.channel.close()  # so that no message waits for a rank that does not read

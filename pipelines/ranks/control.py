"""Rank 0's control of the worker ranks: sends operations, and detects a lost rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from conf.support.terminal import escape_control_chars
from kernels.collectives import RankFailed
from pipelines.jobs.interrupt import RankLost
from pipelines.jobs.run_log import log_of_rank
from pipelines.ranks.encoding import decode, encode
from pipelines.ranks.messages import Channel, Gone, Message, Silent, readable
from pipelines.ranks.rank_context import RankContext

T = TypeVar("T")

CPU = torch.device("cpu")

LOOK_S = 0.2  # poll interval of failure checks
GRACE_S = 3.0  # for the run to end by itself after a rank is lost
END_S = 2.0  # for a rank to end after its socket is closed, and for Python after its main thread has ended
CLOSE_S = 10.0  # for the main thread to end after the ranks


@dataclass
class Worker:
    """A worker rank as rank 0 monitors it: its channel, its answers, and when it last sent a message."""

    rank: int
    name: str
    channel: Channel
    process: "subprocess.Popen[bytes] | None"
    """None if a launcher started it."""
    answers: "SimpleQueue[Message]" = field(default_factory=SimpleQueue)
    heard_at: float = field(default_factory=time.monotonic)

    def how_it_ended(self) -> str:
        if self.process is None:
            return "has ended"
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", out of memory?" if -code == signal.SIGKILL else ""
        name = next((signal_number.name for signal_number in signal.Signals if signal_number == -code), "of real time")
        return f"was ended by signal {-code} ({name}{hint})"

    def end(self) -> None:
        with suppress(Gone):
            self.channel.send({"op": "end"})
            self.channel.wait_for_end(END_S)
        self.channel.close()
        if self.process is None:
            return
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # also ends a stopped process
            self.process.wait()


class Workers:
    """The worker ranks of a run, and the thread that monitors them."""

    def __init__(self, workers: list[Worker], context: RankContext, heartbeat_s: float) -> None:
        """`heartbeat_s`: maximum silence of a rank, in seconds."""
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
        return [worker.process for worker in self._workers if worker.process is not None]

    def tell(self, operation: object, answering: Collection[int] = (), ranks: range | None = None) -> None:
        """Send an operation to the workers in `ranks` (None: all); workers in `answering` return the result.

        Raises RankLost.
        """
        fields, payload = encode(operation)
        header = {"op": type(operation).__name__, "fields": fields, "answering": [*answering]}
        for worker in self._workers:
            if ranks is None or worker.rank in ranks:
                with suppress(Gone):  # the watcher thread reports the reason
                    worker.channel.send(header, payload)
        self.check()

    def meanwhile(self, compute: Callable[[], T]) -> T:
        """Run rank 0's share of an operation while the workers run theirs. Raises RankLost if another rank failed."""
        try:
            result = compute()
        except BaseException:
            self.check()
            self.abort()  # the workers may wait for this rank
            raise
        self.check()
        return result

    def answers(self, kind: type[T]) -> list[T]:
        """Wait for a result of this type from each worker, in rank order. Raises RankLost."""
        return [self.answer_of(worker.rank, kind) for worker in self._workers]

    def answer_of(self, rank: int, kind: Any, device: torch.device = CPU) -> Any:
        """Wait for a result of this type from this rank, which is not rank 0. Its tensors are on the device.

        Raises RankLost.
        """
        while True:
            self.check()
            with suppress(Empty):
                header, payload = self._workers[rank - 1].answers.get(timeout=LOOK_S)
                return decode(kind, header["result"], payload, device)

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        try:
            self.context.check()
        except RankFailed:
            end = time.monotonic() + GRACE_S
            while self._lost is None and time.monotonic() < end:  # a failing rank aborts first, then sends its reason
                time.sleep(LOOK_S)
            self._lost = self._lost or "another rank has failed"
        if self._lost is not None:
            raise RankLost(self._lost)

    def abort(self) -> None:
        """Abort the current step on all ranks; its results are invalid."""
        self.context.abort()

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self.context.abort()
            for worker in self._workers:
                worker.end()
            self._all_ended.set()

    def _watch(self) -> None:
        """Receive messages until the first rank is lost. Then make sure that the run ends."""
        looked_at = time.monotonic()
        while self._lost is None and not self._closed.is_set():
            ready = readable([worker.channel for worker in self._workers], LOOK_S)
            now = time.monotonic()
            was_stopped = now - looked_at > self._heartbeat_s / 2  # for example by Ctrl-Z, which also stops the workers
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
        """End this process by force if it does not end by itself."""
        if not self._closed.wait(GRACE_S):
            print(escape_control_chars(f"error: {self._lost}"), file=sys.stderr, flush=True)
            for worker in self._workers:
                if worker.process is not None:
                    worker.process.kill()
            os._exit(1)
        self._all_ended.wait()  # can be set during interpreter shutdown, when the main thread counts as ended
        end = time.monotonic() + CLOSE_S
        while threading.main_thread().is_alive():  # `join` would hold a lock that interpreter shutdown needs
            if time.monotonic() > end:  # the main thread has other work
                return
            time.sleep(LOOK_S)
        time.sleep(END_S)  # interpreter shutdown waits for a thread in which gloo waits for the lost rank
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

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.context.abort()
        for worker in self._workers:
            worker.channel.close()  # so that no send blocks on a rank that does not read

"""An engine that runs rows in its own process. This module does not import Ray."""

import os
from collections import deque
from collections.abc import Callable, Generator

from conf.errors import UserError
from conf.support.terminal import log_warnings
from kernels.threads import use_cores
from pipelines.jobs.interrupt import RankLost
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import EngineRows, Record
from pipelines.loading.fingerprint import replay_fingerprint
from pipelines.loading.memory import explained_out_of_memory
from pipelines.ranks.launch import leave_launcher
from pipelines.replicas.cores import Cores
from pipelines.replicas.messages import (
    Answer,
    Failed,
    Ready,
    Work,
    Worked,
    encode,
    read_load,
    read_row,
    read_work,
    record_bytes,
)


class RowWorker:
    """Holds an engine and the rows that were sent to it. Methods take and return encoded `messages`.

    Only `beat` may run at the same time as another method.
    """

    _rows: EngineRows

    def __init__(self) -> None:
        self._waiting: deque[PromptRow] = deque()
        self._steps: Generator[list[Record], None, None] | None = None

    def load(self, kind: type[EngineRows], content: bytes) -> bytes:
        """Load the model of a `Load`. `kind`: the class that runs the rows. Returns Ready or Failed."""
        log_warnings()
        return _answered(lambda: self._load(kind, content))

    def work(self, content: bytes) -> bytes:
        """Take the rows of a `Work`, and compute until rows are finished. Returns Worked or Failed."""
        work = read_work(content)
        self._waiting += map(read_row, work.rows)
        return _answered(lambda: self._work(work))

    def beat(self) -> None:
        """Return at once. A process that hangs does not return."""

    def _load(self, kind: type[EngineRows], content: bytes) -> Ready:
        leave_launcher(os.environ)  # a launcher may have started Ray
        load = read_load(content)
        self._cores = Cores(load.num_cpus)
        use_cores(self._cores.cpus)
        self._rows = kind.load(load.run)
        loaded = self._rows.loaded
        return Ready(loaded, replay_fingerprint(loaded.fingerprint))

    def _work(self, work: Work) -> Worked:
        return Worked([record_bytes(record) for record in self._finished(work.seed)], self._rows.counts())

    def _finished(self, seed: int | None) -> list[Record]:
        """Compute until rows are finished, and return their records; empty if there are no rows."""
        while self._steps is not None or self._waiting:
            self._steps = self._steps or self._rows.steps(self._next_row, seed)
            records = next(self._steps, None)
            if records:
                return records
            if records is None:
                self._steps = None
        return []

    def _next_row(self) -> PromptRow | None:
        return self._waiting.popleft() if self._waiting else None


def _answered(work: Callable[[], Answer]) -> bytes:
    """Return the answer, or an error that the user can correct.

    Any other exception ends this process; so does RankLost.
    """
    try:
        with explained_out_of_memory():
            return encode(work())
    except (UserError, OSError) as error:
        return encode(Failed(str(error)))
    except RankLost as error:  # not an Exception subclass, but Ray reports only these
        raise RuntimeError(str(error)) from error

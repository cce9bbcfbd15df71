"""A replica's worker that stops before its first row."""

import os
import signal

from pipelines.replicas import row_worker


class RowWorker(row_worker.RowWorker):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        super().__init__()

"""Rows whose replicas fail. A replica's process imports them by name."""

import os
import signal
from collections.abc import Iterable
from dataclasses import replace

from conf.schema import RunConfig
from pipelines.jobs import report
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import RowRequest
from pipelines.tasks.predict import PredictRows

POISON = "poison"


class PoisonRows(PredictRows):
    """A prompt equal to POISON ends the process that runs it."""

    def ask(self, row: PromptRow, seed: int | None) -> RowRequest:
        if row.prompt == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().ask(row, seed)


class UnloadableRows(PredictRows):
    """Loading ends the process."""

    @classmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "UnloadableRows":
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class UnequalRows(PredictRows):
    """Each process has another model."""

    @classmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "PredictRows":
        made = PredictRows.load(run, progress, rows)
        made.loaded = replace(made.loaded, fingerprint={**made.loaded.fingerprint, "model/x": os.getpid()})
        return made

"""A job: reads rows, appends results to a journal as they finish, and writes files when all rows are done.

A job that ended early can be resumed.
"""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from conf.errors import UserError
from pipelines.jobs import report
from pipelines.jobs.interrupt import Interrupted, Interruption, RankLost, interruption
from pipelines.jobs.journal import BEGIN_AGAIN, Journal
from pipelines.jobs.prompts import PromptRow, Prompts
from pipelines.jobs.rows import ANSWER, Record, Row, RowExecutor

PRINTED = 8  # rows printed at the end; the files hold all rows


@dataclass(frozen=True)
class Finished:
    """The result of a job, after its files are written."""

    first: list[Row]
    """The first rows, at most PRINTED."""
    metrics: dict[str, Any]


class RowJob(ABC):
    """Runs rows and appends the results to the journal as they finish.

    An invalid row becomes an error and does not stop the job.

    The job keeps no rows in memory. A subclass defines the files and metrics of its task.
    """

    def __init__(self, executor: RowExecutor, journal: Journal, max_errors: int | None) -> None:
        self.executor = executor
        self.journal = journal
        self._max_errors = max_errors
        self._num_errors, self._first_error = 0, ""
        self.totals: Counter[str] = Counter()
        for record in journal.read():  # rows of an earlier process
            self.totals.update(_counts(record))
        self.resumed = self.totals.copy()

    @property
    def num_tokens(self) -> int:
        """Tokens that this process has generated, for the progress bar."""
        return self.executor.num_generated_tokens

    @abstractmethod
    def metrics(self, prompts: Prompts, load_s: float, run_s: float) -> dict[str, Any]:
        """Return the contents of metrics.json. Counts include resumed rows; times and speeds are of this process."""

    @abstractmethod
    def write(self, records: Callable[[], Iterator[Record]]) -> None:
        """Write the result files. Each call of `records` iterates again from the start, in row order."""

    def complete(self, prompts: Prompts, config_yaml: str, load_s: float) -> Finished:
        """Run every row that is not done, write all files and remove the journal.

        Raises Interrupted after the step in which a signal came, and UserError if the job cannot go on. In both cases
        finished rows stay in the journal.
        """
        journal = self.journal
        if journal.num_rows:
            print(f"resuming {journal.folder}: {journal.num_rows} rows are done", file=sys.stderr)
        try:
            with journal.writing():
                report.write_run(journal.folder, config_yaml, {})
            with interruption() as signals:
                run_s = self._run_shown(prompts, signals)
                metrics = self.metrics(prompts, load_s, run_s)
                with journal.writing():
                    self.write(lambda: signals.checked(journal.records()))
                    report.write_atomically(journal.folder / "metrics.json", [json.dumps(metrics, indent=2) + "\n"])
        except Interrupted:
            journal.sync()
            print(f"interrupted: {journal.kept}", file=sys.stderr)
            raise
        except RankLost as error:
            journal.sync()
            raise UserError(f"{error}; {journal.kept}") from error
        first = [record["row"] for record in islice(journal.records(), PRINTED)]
        journal.remove()
        return Finished(first, metrics)

    def base_metrics(self, prompts: Prompts) -> dict[str, Any]:
        return {
            "num_prompts": self.totals["num_prompts"],
            "num_resumed_rows": self.resumed["num_prompts"],
            "num_errors": self.totals["num_errors"],
            "num_blank_lines": prompts.num_blank_lines,
            "unused_fields": prompts.unused_fields,
            "num_prompt_tokens": self.totals["num_prompt_tokens"],
            "num_cached_tokens": self.totals["num_cached_tokens"],
        }

    def _run_shown(self, prompts: Prompts, signals: Interruption) -> float:
        start = time.perf_counter()
        rows = self._undone(signals.checked(prompts))
        with (
            report.progress_bar() as progress,
            closing(self.executor.steps(lambda: next(rows, None), self.journal.seed)) as steps,
        ):
            for records in steps:
                for record in records:
                    self._finish(record)
                speed = self.num_tokens / (time.perf_counter() - start)
                progress.generated(self.totals["num_prompts"], prompts.num_rows, speed)
                signals.check()
            self.journal.sync()
        return time.perf_counter() - start

    def _undone(self, rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
        """Yield the rows that the journal lacks.

        The journal's last row proves that the input is the same. So rows that are missing before it are yielded only
        after its digest is compared with the input.
        """
        waiting: list[PromptRow] = []  # at most the rows that were running when the job ended
        num_read = 0
        for row in rows:
            num_read = row.index + 1
            if row.index >= self.journal.end:
                yield from waiting
                waiting.clear()
                yield row
            elif not self.journal.has(row.index, row.digest):
                waiting.append(row)
        if num_read < self.journal.end:
            have = f"{self.journal.folder} has a row {self.journal.end - 1} that is done"
            raise UserError(f"the input has {num_read} rows, but {have}: give the same input, or {BEGIN_AGAIN}")
        yield from waiting

    def _finish(self, record: Record) -> None:
        self.journal.append(record)
        self.totals.update(_counts(record))
        index, error = record["row"]["index"], record["row"]["error"]
        if error is None:
            return
        self._num_errors += 1
        self._first_error = self._first_error or f"row {index}: {error}"
        most = self._max_errors
        if most is not None and self._num_errors > most:
            self.journal.sync()
            problem = f"more than predict.max_errors={most} rows failed; the first is {self._first_error}"
            raise UserError(f"{problem}; {self.journal.kept}")


def _counts(record: Record) -> dict[str, int]:
    row = record["row"]
    return {
        "num_prompts": 1,
        "num_errors": int(row["error"] is not None),
        "num_truncated_rows": int("num_truncated_tokens" in row),
        "num_answers": int(ANSWER in record),
        "num_prompt_tokens": row["num_prompt_tokens"],
        "num_cached_tokens": record["num_cached_tokens"],
        "num_generated_tokens": row.get("num_generated_tokens", 0),
    }

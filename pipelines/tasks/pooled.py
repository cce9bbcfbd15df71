"""Shared code of `task=embed` and `task=score`: a row becomes a pooled request, whose numbers become a result row."""

import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.schema import RunConfig
from conf.support.terminal import escape_control_chars, escape_line
from pipelines.engine import Output
from pipelines.engine.faults import row_error
from pipelines.jobs import report
from pipelines.jobs.job import Finished, RowJob
from pipelines.jobs.journal import open_journal
from pipelines.jobs.prompts import PromptRow, Prompts
from pipelines.jobs.rows import EngineRows, Loaded, Record, Row, RowRequest
from pipelines.loading.fingerprint import fingerprint
from pipelines.loading.open_pooler import open_pooler
from pipelines.loading.pooler import Pooler
from pipelines.tasks.row_tasks import open_prompts, row_executor


class PooledRows(EngineRows):
    """Computes numbers from rows."""

    def __init__(self, pooler: Pooler, loaded: Loaded) -> None:
        super().__init__(pooler.engine, loaded)
        self._pooler = pooler

    @classmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "PooledRows":
        source, pooler = open_pooler(run, progress)
        parts = fingerprint(run, source, pooler.engine)
        parts |= {f"{pooler.section}.{name}": value for name, value in pooler.settings.items()}
        loaded = Loaded(run.decode, parts, pooler.engine.executor.weight_bytes, pooler.num_values)
        return cls(pooler, loaded)

    def ask(self, row: PromptRow, seed: int | None) -> RowRequest:
        return self._pooler.request(row, self.loaded.decode)

    def record(self, row: PromptRow, row_request: RowRequest, output: Output) -> Record:
        result = {"index": row.index, "id": row.id, "num_prompt_tokens": output.num_prompt_tokens, "error": None}
        if row_request.prompt.num_truncated:
            result["num_truncated_tokens"] = row_request.prompt.num_truncated
        return self.with_values(result, self._pooler.values(output))

    @staticmethod
    @abstractmethod
    def with_values(result: Row, values: Tensor) -> Record:
        """Return the journal record of a row's result and its float32 numbers."""

    @staticmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        result = {"index": row.index, "id": row.id, "num_prompt_tokens": 0, "error": row_error(error, row.index)}
        return {"row": result}


class PooledJob(RowJob):
    """A job whose rows become numbers."""

    @property
    def num_tokens(self) -> int:
        return self.totals["num_prompt_tokens"] - self.resumed["num_prompt_tokens"]

    def metrics(self, prompts: Prompts, load_s: float, run_s: float) -> dict[str, Any]:
        return {
            **self.base_metrics(prompts),
            "num_values": self.executor.loaded.num_values,
            "num_truncated_rows": self.totals["num_truncated_rows"],
            "start_s": report.START_S,
            "load_s": load_s,
            "run_s": run_s,
            "prompt_tokens_per_s": self.num_tokens / run_s,
            "weight_bytes": self.executor.loaded.weight_bytes,
            "peak_memory_bytes": self.executor.counts().peak_memory_bytes,
        }


def run_pooled(
    run: RunConfig, output_dir: Path, dump: report.Dump, kind: type[PooledRows], make_job: type[PooledJob]
) -> tuple[Finished, Path]:
    """Run a job, which can be resumed like a job of task=predict. Return its results and their folder.

    Raises UserError before any file is written; and, with all finished rows kept, if the job cannot go on.
    """
    prompts = open_prompts(run.predict)
    start = time.perf_counter()
    with row_executor(kind, run, prompts) as executor:
        load_s = time.perf_counter() - start
        parts = {"input": prompts.sha256, **executor.loaded.fingerprint}
        with closing(open_journal(run.predict.resume, output_dir, parts)) as journal:
            job = make_job(executor, journal, run.predict.max_errors)
            return job.complete(prompts, dump(run, journal.folder), load_s), journal.folder


def print_results(lines: list[str], finished: Finished, folder: Path) -> None:
    """Print a line for each of the first rows, including errors, and the metrics."""
    metrics = finished.metrics
    for row, line in zip(finished.first, lines, strict=True):
        text = f"error: {row['error']}" if row["error"] else line
        print(escape_line(f"[{row['index']}] {text}"))
    if metrics["num_prompts"] > len(lines):
        print(f"... and {metrics['num_prompts'] - len(lines)} more")
    if metrics["num_truncated_rows"]:
        print(
            f"rows of which the end was left out, by the checkpoint's max_seq_length: {metrics['num_truncated_rows']}"
        )
    if metrics["unused_fields"]:
        print(escape_line(f"fields of the rows that are not used: {', '.join(metrics['unused_fields'])}"))
    print()
    report.print_table(
        [
            (
                "rows",
                f"{metrics['num_prompts']} ({metrics['num_errors']} with errors, {metrics['num_blank_lines']} blank lines skipped)",
            ),
            ("tokens", f"{metrics['num_prompt_tokens']:,} ({metrics['num_cached_tokens']:,} from the prefix cache)"),
            ("load", f"{metrics['load_s']:.2f} s"),
            ("run", f"{metrics['run_s']:.2f} s"),
            ("speed", f"{metrics['prompt_tokens_per_s']:,.1f} tokens/s"),
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(escape_control_chars(f"output: {folder}"))

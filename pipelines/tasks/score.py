"""`task=score`: a reward model's label outputs, a reranker's probability that a document answers a query, or the cosine
of their vectors by an embedding model."""

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.jobs import report
from pipelines.jobs.journal import dumps
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Record, Row
from pipelines.tasks.pooled import PooledJob, PooledRows, print_results, run_pooled


class ScoreRows(PooledRows):
    """Computes scores from rows."""

    @staticmethod
    def with_values(result: Row, values: Tensor) -> Record:
        return {"row": {**result, "scores": values.tolist()}}

    @staticmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        return {"row": {**PooledRows.failed(row, error)["row"], "scores": None}}


class ScoreJob(PooledJob):
    """Writes a line of scores.jsonl for each input row."""

    def write(self, records: Callable[[], Iterator[Record]]) -> None:
        report.write_atomically(self.journal.folder / "scores.jsonl", (f"{dumps(r['row'])}\n" for r in records()))


def run_score(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Run the task.

    Raises UserError before any file is written; if the job cannot go on, with all finished rows kept; and if no row has
    scores, after all files are written.
    """
    finished, folder = run_pooled(run, output_dir, dump, ScoreRows, ScoreJob)
    lines = [", ".join(f"{score:.6g}" for score in row["scores"] or []) for row in finished.first]
    print_results(lines, finished, folder)
    metrics = finished.metrics
    if metrics["num_errors"] == metrics["num_prompts"]:
        raise UserError(
            f"none of the {metrics['num_prompts']} rows has scores; the first: {finished.first[0]['error']}"
        )

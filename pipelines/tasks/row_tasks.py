"""Functions for all tasks over rows: they open the rows and load the executor that computes the rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conf.errors import UserError
from conf.schema import ParallelMode, RunConfig
from conf.tasks import PredictConfig
from pipelines.jobs import report
from pipelines.jobs.journal import named_folder
from pipelines.jobs.prompts import GIVE, Prompts, read_prompts
from pipelines.jobs.rows import EngineRows, RowExecutor
from pipelines.replicas.cluster import rows_on_ray


def open_prompts(config: PredictConfig) -> Prompts:
    """Return the rows of `predict.data`.

    Raises UserError if they cannot be read, and if the job to resume does not exist.
    """
    if config.data is None:
        raise UserError(f"predict.data is missing: {GIVE}")
    if config.resume not in ("auto", "none"):
        named_folder(config.resume)
    return read_prompts(config.data, read_batch_line)


@contextmanager
def row_executor(kind: type[EngineRows], run: RunConfig, prompts: Prompts) -> Iterator[RowExecutor]:
    """Load the executor of a job's rows, and close it after the block.

    Raises UserError as `EngineRows.load` and `rows_on_ray` do.
    """
    if run.parallel.mode is ParallelMode.ray:
        with rows_on_ray(kind, run) as replicas:
            yield replicas
        return
    with report.progress_bar() as progress:
        rows = kind.load(run, progress, () if prompts.num_rows is None else prompts)  # None: can be read only once
    yield rows


def read_batch_line(values: dict[str, Any]) -> dict[str, Any]:
    """Return a line of an OpenAI batch as the fields of a row. Raises UserError as `row_of` does."""
    try:
        from pipelines.server.api.batch_lines import row_of  # here: only batches need pydantic
    except ImportError as error:
        raise UserError("a batch's lines need the package pydantic: pip install 'quintet[serve]'") from error
    return row_of(values)[0]

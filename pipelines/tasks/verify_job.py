"""The job in `verify.folder`: its settings, and what has changed since it ran."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conf.errors import UserError
from conf.schema import ModelConfig, ParallelConfig, ParallelMode, RunConfig, Weights
from conf.support.terminal import escape_line
from pipelines.jobs import report
from pipelines.jobs.hub_commits import with_commits
from pipelines.jobs.journal import NAME as JOURNAL
from pipelines.jobs.run_lock import describe
from pipelines.tasks.replay import lock_differences, read_lock
from pipelines.tasks.verify_rows import KINDS


def check_settings(run: RunConfig) -> None:
    """Raises UserError for settings that task=verify does not read."""
    if run.verify.folder is None:
        raise UserError("verify.folder is missing: give the folder of a finished job of task=predict, embed or score")
    default = ModelConfig(str(report.REPOSITORY / "models/tiny"), run.model.hub)
    for name, value in vars(run.model).items():
        if value != getattr(default, name):
            problem = f"model.{name}={getattr(value, 'name', value)} is not used by task=verify"
            raise UserError(f"{problem}: leave it out, because the job in verify.folder has its own")


def finished_job(folder: Path) -> RunConfig:
    """Return the settings of the finished job in the folder. Raises UserError for any other folder."""
    from conf.compose import saved_run  # here, so that an engine can be built where Hydra is not installed

    where, remedy = f"verify.folder={folder}", "give the folder of a finished job of task=predict, embed or score"
    if not folder.is_dir():
        raise UserError(f"{where} is not a folder: {remedy}")
    if (folder / JOURNAL).exists():
        raise UserError(f"{where} has an unfinished job: finish it by run.py predict.resume={folder}, then verify it")
    with of_folder(folder):
        job = with_commits(saved_run(folder))
    if job.task not in KINDS:
        raise UserError(f"{where} is a run of task={job.task.name}, which has no rows: {remedy}")
    if not (folder / "metrics.json").is_file():
        raise UserError(f"{where} has no metrics.json, so that its job did not finish: {remedy}")
    if job.predict.data in (None, "-"):
        raise UserError(f"{where} has rows of standard input, which are not kept: run the job again with a file")
    if job.predict.export:
        raise UserError(f"{where} ran an exported model: run a job with model.path={folder}/export, and verify that")
    if job.parallel.mode is ParallelMode.ray:
        if job.parallel.tp or job.parallel.pp:
            raise UserError(f"{where} ran ranks on Ray, which one engine is not: verify a job of parallel=tp or pp")
        job = replace(job, parallel=ParallelConfig())
    path = job.model.path
    if job.model.weights is Weights.checkpoint and path.startswith("/") and not Path(path).exists():
        raise UserError(f"{where} needs its model {path}, which does not exist: put it back")
    return replace(job, predict=replace(job.predict, resume="none", output_file=None))


@contextmanager
def of_folder(folder: Path) -> Iterator[None]:
    """Put the folder in front of a UserError of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"verify.folder={folder} cannot be verified: {error}") from error


def changes_since(folder: Path, job: RunConfig) -> list[str] | None:
    """Return what differs from the job's run.lock: files, packages, processor. None: the job has no run.lock."""
    if not (folder / report.LOCK).is_file():
        return None
    lines = [f"{kind} {line}" for kind, line in lock_differences(read_lock(folder), describe(job))]
    for line in lines:
        print(escape_line(f"changed since the job: {line}"), file=sys.stderr)
    return lines

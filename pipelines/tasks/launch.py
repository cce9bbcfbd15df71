"""Run the task of a composed RunConfig."""

import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from conf.errors import UserError
from conf.schema import ParallelMode, RunConfig, Task
from conf.support.signals import interrupts_waiting, reader_may_leave
from conf.support.terminal import log_warnings
from pipelines.jobs.hub_commits import with_commits
from pipelines.jobs.interrupt import RankLost
from pipelines.jobs.report import Dump, reset_peak_memory
from pipelines.jobs.run_lock import locked
from pipelines.jobs.run_log import run_log
from pipelines.jobs.tracker import tracked
from pipelines.ranks.launch import degrees, joined, refuse_launched_server

Run = Callable[[RunConfig, Path, Dump], None]


def launch(run: RunConfig, output_dir: Path, dump: Dump) -> None:
    """Run the task. The config.yaml that `dump` returns is written next to the results, so that the run can be repeated.

    run.lock is written next to it. Raises UserError.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # printing a row's text must not end the run
    log_warnings()
    launched = joined(os.environ)
    degrees(run.parallel, launched)  # raises for a wrong number of ranks before anything is loaded
    if run.task is Task.serve or run.chat.web:
        refuse_launched_server(launched)
    with reader_may_leave(), run_log(run.task.name, output_dir):
        run = with_commits(run)
        with tracked(run, dump) as noted, locked(run, noted) as dump:  # the tracker logs run.lock too
            _run_task(run, output_dir, dump)


def _run_task(run: RunConfig, output_dir: Path, dump: Dump) -> None:
    if run.task is Task.serve:  # the model runs in another process; this process does not import torch
        from pipelines.server.serve import run_serve

        run_serve(run, output_dir, dump)
    else:
        _launch_with_torch(run, output_dir, dump)


def _launch_with_torch(run: RunConfig, output_dir: Path, dump: Dump) -> None:
    reset_peak_memory()
    with interrupts_waiting(), _collector_paused():
        from pipelines.loading.memory import explained_out_of_memory

        function = _function_of(run.task)
    if run.parallel.mode is ParallelMode.auto:
        from pipelines.loading.parallel_planner import planned

        num_rows = run.bench.batch_size if run.task is Task.bench else run.predict.batch_size
        num_rows *= max(run.decode.n or 1, run.decode.num_beams or 1)
        chosen = planned(run.task, run.model, run.quant, run.parallel, run.device, num_rows)
        if chosen is None:
            return
        run = replace(run, parallel=chosen)
    try:
        with explained_out_of_memory():
            function(run, output_dir, dump)
    except RankLost as error:
        raise UserError(str(error)) from error


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Collect no garbage during imports, and never look at the imported objects again. A start of `tiny` takes 0.82 of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _function_of(task: Task) -> Run:
    """Return `run_NAME` of the task's module. Imports only this module: the import of all tasks takes 0.1 s longer."""
    function: Run = getattr(import_module(f"pipelines.tasks.{task.name}"), f"run_{task.name}")
    return function

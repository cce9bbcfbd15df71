"""From a composed RunConfig to the task that it names."""

import io
import logging
import sys
from pathlib import Path

from conf.schema import RunConfig, Task
from pipelines.bench import run_bench
from pipelines.convert import run_convert
from pipelines.evaluate import run_evaluate
from pipelines.memory import explained_out_of_memory
from pipelines.predict import run_predict
from pipelines.quantize import run_quantize
from pipelines.report import Dump, reader_may_leave, reset_peak_memory

TASKS = {
    Task.predict: run_predict,
    Task.bench: run_bench,
    Task.evaluate: run_evaluate,
    Task.convert: run_convert,
    Task.quantize: run_quantize,
}


def launch(run: RunConfig, output_dir: Path, dump: Dump) -> None:
    """Run the task. What `dump` gives is written beside the results, so that they can be made again. Raises UserError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # no text of a row may end a run while it is printed
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    reset_peak_memory()
    with reader_may_leave(), explained_out_of_memory():
        TASKS[run.task](run, output_dir, dump)

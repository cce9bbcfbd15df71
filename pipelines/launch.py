"""From a composed RunConfig to the task that it names."""

import logging
from pathlib import Path

from conf.schema import RunConfig, Task
from pipelines.predict import run_predict

TASKS = {Task.predict: run_predict}


def launch(run: RunConfig, output_dir: Path, config_yaml: str) -> None:
    """Run the task. `config_yaml` is written beside the results, so that they can be made again. Raises UserError."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    TASKS[run.task](run, output_dir, config_yaml)

"""`python run.py [group=option ...] [key=value ...]`: compose the config and run the task. `--help` lists all."""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

if __name__ == "__main__":  # an interrupt during the imports ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.compose import CONFIG_ERRORS, dump, explain, for_hydra, replayed, swept_tasks, to_run_config, version
from conf.errors import Difference, UserError
from conf.schema import RunConfig
from conf.support.signals import interrupts_waiting, reader_may_leave
from conf.support.terminal import escape_control_chars
from pipelines.loading.worker import followed


def main() -> None:
    """Run one job, or with -m a sweep and then its table. Raises UserError if jobs of a sweep failed."""
    sweep_id, swept = uuid4().hex, swept_tasks(sys.argv[1:])  # a launcher's workers get both with run_job

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def run_job(config: DictConfig) -> Any:
        job = HydraConfig.get()
        output_dir = Path(job.runtime.output_dir)
        try:
            if job.mode == RunMode.RUN:
                return _launch(to_run_config(config), output_dir)
            with interrupts_waiting():
                from pipelines.tasks.sweep import objective, recorded_job
                from pipelines.tasks.sweep_jobs import Sweep
            sweep = Sweep(sweep_id, job.sweep.dir)
            with recorded_job(sweep, output_dir, job.job.num, list(job.overrides.task), config.sweep):
                _launch(to_run_config(config, swept), output_dir)
            return objective(output_dir, config.sweep.objective)
        except (UserError, OSError) as error:
            _end(error, f"error: {error}")
        finally:
            if output_dir.is_dir() and not any(output_dir.iterdir()):
                output_dir.rmdir()

    failure = None
    try:
        run_job()
    finally:  # also after an interrupted sweep
        if HydraConfig.initialized():  # initialized by its callback
            with interrupts_waiting():
                from pipelines.tasks.sweep import write_sweep
                from pipelines.tasks.sweep_jobs import Sweep
            failure = write_sweep(Sweep(sweep_id, HydraConfig.get().sweep.dir))
    if failure:
        raise UserError(failure)


def _launch(run: RunConfig, output_dir: Path) -> None:
    from pipelines.tasks.launch import launch  # here, because --help and completion do not need it

    launch(run, output_dir, dump)


def _end(error: Exception, line: str) -> NoReturn:
    """Print the line, or the result of a comparison, and exit with the error's code."""
    print(escape_control_chars(str(error) if isinstance(error, Difference) else line), file=sys.stderr)
    sys.exit(getattr(error, "exit_code", 1))


def _print_visibly(*raised: Any) -> None:
    """Print the traceback of an unexpected error with control characters escaped, because it may quote a row."""
    print(escape_control_chars("".join(traceback.format_exception(*raised))), end="", file=sys.stderr)


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors instead of printing them
    sys.excepthook = _print_visibly
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with reader_may_leave():
            if "--version" in sys.argv:
                print(f"Quintet {version()}")
            elif not followed():
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if replay := replayed(sys.argv[1:]):
                    from pipelines.tasks.replay import run_replay

                    run_replay(*replay, dump)
                else:
                    sys.argv[1:] = for_hydra(sys.argv[1:])
                    main()
    except (UserError, OSError, *CONFIG_ERRORS) as error:
        _end(error, f"error: {error if isinstance(error, UserError) else explain(error)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)

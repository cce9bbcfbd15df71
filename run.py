"""`python run.py [group=option ...] [key=value ...]`: compose the config and hand it to the pipelines. `--help` lists everything."""

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.compose import dump, explain, quote_prompt, register, to_run_config
from conf.errors import UserError


def main() -> None:
    """One run, or with -m a sweep: every job, then their table. Raises UserError if some of a sweep's jobs failed."""
    sweep_dir = Path()
    jobs: list[Path] = []  # folders of a sweep's jobs; what else lies in its folder is older
    num_failed = 0

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def run(config: DictConfig) -> None:
        nonlocal sweep_dir
        output_dir = Path(HydraConfig.get().runtime.output_dir)
        errors_end_here: AbstractContextManager[None] = nullcontext()
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            from pipelines.sweep import recorded_job

            if output_dir in jobs:
                sys.exit(
                    f"error: two jobs of the sweep would write {output_dir}: give hydra.sweep.subdir=${{hydra:job.num}}"
                )
            sweep_dir = Path(HydraConfig.get().sweep.dir)
            jobs.append(output_dir)
            errors_end_here = recorded_job(output_dir, OmegaConf.to_container(HydraConfig.get().overrides.task))
        try:
            with errors_end_here:
                run = to_run_config(config)
                # Not at the top, because it imports torch, which --help and Tab completion need not wait for.
                from pipelines.launch import launch

                launch(run, output_dir, dump)
        except (UserError, OSError) as error:
            sys.exit(f"error: {error}")
        finally:
            if output_dir.is_dir() and not any(output_dir.iterdir()):
                output_dir.rmdir()

    try:
        run()
    finally:  # also when the sweep was interrupted
        if jobs:
            from pipelines.sweep import write_sweep

            num_failed = write_sweep(sweep_dir, jobs)
    if num_failed:
        raise UserError(f"{num_failed} of {len(jobs)} jobs failed: see {sweep_dir / 'sweep.md'}")


if __name__ == "__main__":
    arguments = quote_prompt(sys.argv[1:])
    sys.argv[1:] = sorted(
        arguments, key=lambda a: a not in ("-m", "--multirun")
    )  # Hydra takes no flag between overrides
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra shall raise its errors, not print them its own way
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    register()
    try:
        main()
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)

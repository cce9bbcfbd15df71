"""`python run.py [group=option ...] [key=value ...]`: compose the config and hand it to the pipelines. `--help` lists everything."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from conf.compose import dump, quote_prompt, register, to_run_config
from conf.errors import UserError


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = to_run_config(config)
        from pipelines.launch import (
            launch,  # here, because it imports torch, which --help and Tab completion need not wait for
        )

        status = launch(run, output_dir, dump(run, output_dir))
    except UserError as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # the sweep's other jobs go on; Hydra reports this one at the end
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        status = 130
    if status:
        _remove_if_empty(output_dir)
        sys.exit(status)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


if __name__ == "__main__":
    sys.argv[1:] = quote_prompt(sys.argv[1:])
    register()
    main()

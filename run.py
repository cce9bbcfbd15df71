"""`python run.py [group=option ...] [key=value ...]`: compose the config and hand it to the pipelines. `--help` lists everything."""

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # no traceback where an interrupt comes during the imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.compose import dump, explain, quote_prompt, register, saved_config, to_run_config
from conf.errors import UserError


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = to_run_config(config)
        # Not at the top, because it imports torch, which --help and Tab completion need not wait for.
        from pipelines.launch import launch

        launch(run, output_dir, dump)
    except BrokenPipeError:
        # Whoever read the output has seen enough, and the files come before the output. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # the sweep's other jobs go on; Hydra raises this one at the end
        sys.exit(f"error: {error}")
    finally:
        if output_dir.is_dir() and not any(output_dir.iterdir()):
            output_dir.rmdir()


if __name__ == "__main__":
    sys.argv[1:] = quote_prompt(saved_config(sys.argv[1:]))
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra shall raise its errors, not print them its own way
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    register()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except (UserError, HydraException, OmegaConfBaseException, OSError) as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)

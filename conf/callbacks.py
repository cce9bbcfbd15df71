"""What Hydra calls when a sweep begins."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class KnownSweep(Callback):
    """Makes a sweep's config known to HydraConfig, where Hydra itself sets a job's, and only where the job runs.

    So `run.py` finds the folder of the sweep with any launcher, and also after an interrupt, of which Hydra tells no callback.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)

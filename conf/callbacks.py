"""Hydra callback for the start of a sweep."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class KnownSweep(Callback):
    """Set a sweep's config in HydraConfig. Hydra sets only a job's config, and only in the process of the job.

    `run.py` then finds the sweep's folder with any launcher, and also after an interrupt, which Hydra reports to no
    callback.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)

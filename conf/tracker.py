"""Settings of experiment trackers. A part of schema.py."""

import os
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from conf.constraints import check_fields, one_of, option


class Tracker(Enum):
    none = "none"
    mlflow = "mlflow"  # extra `mlflow`


FORM = "a URI without a password, such as sqlite:////FOLDER/mlflow.db or http://HOST:5000"
_MLFLOW = {"kind": one_of(Tracker.mlflow)}


def _is_uri(uri: Any) -> bool:
    """Whether it is a URI without a password, because config.yaml and the store itself would have it."""
    return re.fullmatch(r"[a-z0-9+]+:.+|databricks", uri) is not None and not re.search(r"//[^/@]*:[^/@]*@", uri)


@dataclass
class TrackerConfig:
    """A run logs its config, metrics, tables and pictures to this store when it ends."""

    kind: Tracker = option(Tracker.none, typed_as="tracker")
    uri: str | None = option(None, form=(_is_uri, FORM), only_with=_MLFLOW)
    """The tracking store. null: MLflow's own default, which its variable MLFLOW_TRACKING_URI sets.

    Passwords are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or in MLFLOW_TRACKING_URI.
    """
    experiment: str = option("quintet", form=(bool, "a name"), only_with=_MLFLOW)
    """The experiment of the store that the run belongs to."""

    def __post_init__(self) -> None:
        check_fields(self, "tracker")

    @property
    def saved(self) -> "TrackerConfig":
        """Return the settings with the absolute path of a SQLite file, for a config that runs in another folder."""
        if file := re.fullmatch(r"sqlite:///([^/].*)", self.uri or ""):
            return replace(self, uri=f"sqlite:///{os.path.abspath(file[1])}")
        return self

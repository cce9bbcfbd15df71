"""Settings of experiment trackers. A part of schema.py."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from conf.constraints import check_fields, one_of, option


class Tracker(Enum):
    none = "none"
    mlflow = "mlflow"  # extra `mlflow`


_MLFLOW = {"kind": one_of(Tracker.mlflow)}


def _is_uri(uri: Any) -> bool:
    return re.fullmatch(r"[a-z+]+:.+|databricks", uri) is not None


@dataclass
class TrackerConfig:
    """Where a run is logged when it ends: its config, metrics, tables and pictures."""

    kind: Tracker = option(Tracker.none, typed_as="tracker")
    uri: str | None = option(
        None, form=(_is_uri, "a URI such as sqlite:////FOLDER/mlflow.db or http://HOST:5000"), only_with=_MLFLOW
    )
    """The tracking store. null: MLflow's own default, which its variable MLFLOW_TRACKING_URI sets."""
    experiment: str = option("quintet", form=(bool, "a name"), only_with=_MLFLOW)
    """The experiment of the store that the run belongs to."""

    def __post_init__(self) -> None:
        check_fields(self, "tracker")

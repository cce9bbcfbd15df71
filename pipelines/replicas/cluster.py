"""Entry points to replicas on Ray.

The modules that import Ray are imported here, after Ray's settings are in the environment.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from conf.errors import UserError
from conf.schema import RunConfig

if TYPE_CHECKING:  # Ray is optional for a job, and the server's HTTP process must not import torch
    from pipelines.jobs.rows import EngineRows, RowExecutor
    from pipelines.replicas.replicas import Replicas


def replicas_of(run: RunConfig) -> "Replicas":
    """Return the engines of a server with several replicas. Raises UserError if Ray or machines are missing."""
    with _ray(f"serve.replicas={run.serve.replicas}"):
        from pipelines.replicas.workers import on_ray
    return on_ray(run)


@contextmanager
def rows_on_ray(kind: "type[EngineRows]", run: RunConfig) -> "Iterator[RowExecutor]":
    """Load `parallel.replicas` engines, which end with the block. `kind`: the class that runs rows in each replica.

    Raises UserError if Ray or machines are missing, and any error of a replica's loading.
    """
    with _ray("parallel=ray"):
        from pipelines.replicas.row_replicas import start_rows
    with closing(start_rows(kind, run)) as replicas:
        replicas.load()
        yield replicas


@contextmanager
def _ray(setting: str) -> Iterator[None]:
    """Context for imports of Ray. Raises UserError if Ray is not installed.

    Ray executes code that reaches its ports, which are open to the network. So a Ray instance that this process
    starts requires a token; a cluster has its own settings. Ray reads these settings at import.
    """
    if not os.environ.get("RAY_ADDRESS"):
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "msgspec"):
            raise
        raise UserError(f"{setting} needs the package {error.name}: pip install 'quintet[ray]'") from error

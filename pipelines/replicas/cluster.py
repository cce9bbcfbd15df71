"""Begin several engines on Ray. What imports Ray is imported here, once Ray's settings are in the environment."""

import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from conf.errors import UserError
from conf.schema import RunConfig

if TYPE_CHECKING:  # a job needs no extra, and the server's HTTP process no torch
    from pipelines.replicas.replicas import Replicas
    from pipelines.rows import EngineRows, RowExecutor


def replicas_of(run: RunConfig) -> "Replicas":
    """Return the engines of a server with several. Raises UserError where Ray or machines for it are missing."""
    with _ray(f"serve.replicas={run.serve.replicas}"):
        from pipelines.replicas.workers import on_ray
    return on_ray(run)


@contextmanager
def rows_on_ray(kind: "type[EngineRows]", run: RunConfig) -> "Iterator[RowExecutor]":
    """Load `parallel.replicas` engines, which end with the block. `kind`: what each of them runs rows by.

    Raises UserError where Ray or machines for it are missing, and whatever a replica's loading does.
    """
    with _ray("parallel=ray"):
        from pipelines.replicas.row_replicas import start_rows
    with closing(start_rows(kind, run)) as replicas:
        replicas.load()
        yield replicas


@contextmanager
def _ray(setting: str) -> Iterator[None]:
    """Within the block Ray may be imported. Raises UserError where it is missing.

    Ray runs any code that reaches its ports, which are open to the network. Our own Ray asks for a token, a cluster for its own: Ray reads
    these settings when it is imported.
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

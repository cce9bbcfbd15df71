"""The door to Ray."""

import os
import secrets

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines.replicas.replicas import Replicas


def replicas_of(run: RunConfig) -> Replicas:
    """Return the engines of a server with several. Raises UserError where Ray or machines for it are missing.

    Ray runs any code that reaches its ports, which are open to the network. Our own Ray asks for a token, a cluster for its own.
    """
    if not os.environ.get("RAY_ADDRESS"):
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    try:
        from pipelines.replicas.workers import on_ray  # which reads these
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        message = f"serve.replicas={run.serve.replicas} needs the package ray: pip install 'quintet[ray]'"
        raise UserError(message) from error
    return on_ray(run)

"""This process and Ray. Ray's settings for its own ports are read when this is imported."""

import os
import signal
import socket
import threading

import ray
from ray.exceptions import RayError

from conf.errors import UserError, shortened

OBJECT_STORE_BYTES = 80 << 20  # all that Ray carries here are frames; it takes no less
REACH_S = 10.0  # for the cluster to be reached


def connect() -> tuple[list[int], list[int]]:
    """Return the processors and the GPUs of each machine: of the cluster that RAY_ADDRESS names, else this one's. Raises UserError."""
    if not ray.is_initialized():
        before = signal.getsignal(signal.SIGTERM)
        _connect(os.environ.get("RAY_ADDRESS"))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray sets its own, which ends with another exit code
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [int(each.get("CPU", 0)) for each in resources], [int(each.get("GPU", 0)) for each in resources]


def _connect(address: str | None) -> None:
    """Begin a Ray of our own on this machine, or join the cluster at an address. Raises UserError."""
    try:
        if address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), REACH_S).close()  # Ray itself tries for minutes
            ray.init(address=address, logging_level="warning")
        else:
            store = OBJECT_STORE_BYTES
            ray.init("local", include_dashboard=False, object_store_memory=store, logging_level="warning")
    except (OSError, RuntimeError, ValueError, RayError) as error:
        why = shortened(" ".join(str(error).split()))
        if not address:
            raise UserError(f"Ray cannot be started: {why}") from error
        remedy = "give HOST:PORT of a cluster's head, or leave it out"
        raise UserError(f"RAY_ADDRESS={address} cannot be reached ({why}): {remedy}") from error

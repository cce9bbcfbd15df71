"""This process's connection to a Ray cluster, or to a Ray instance that it starts. This module imports Ray."""

import os
import signal
import socket
import threading

import ray
from ray.exceptions import RayError

from conf.errors import UserError, shortened
from pipelines.replicas.resources import ResourceSpec

OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; it carries only small messages here
REACH_S = 10.0  # time limit of a connection to the cluster
PLACE_S = 5.0  # time in which Ray assigns free resources; a longer wait means that they are in use


def connect() -> tuple[list[int], list[int]]:
    """Return the CPUs and the GPUs of each machine, of the cluster at RAY_ADDRESS, else of this machine.

    Raises UserError.
    """
    if not ray.is_initialized():
        before = signal.getsignal(signal.SIGTERM)
        _connect(os.environ.get("RAY_ADDRESS"))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler would change the exit code
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [int(node.get("CPU", 0)) for node in resources], [int(node.get("GPU", 0)) for node in resources]


def _connect(address: str | None) -> None:
    try:
        if address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), REACH_S).close()  # Ray itself would retry for minutes
            ray.init(address=address, logging_level="warning")
        else:
            store = OBJECT_STORE_BYTES
            ray.init("local", include_dashboard=False, object_store_memory=store, logging_level="warning")
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = shortened(" ".join(str(error).split()))
        if not address:
            raise UserError(f"Ray cannot be started: {reason}") from error
        remedy = "give HOST:PORT of a cluster's head, or leave it out"
        raise UserError(f"RAY_ADDRESS={address} cannot be reached ({reason}): {remedy}") from error


def waiting_for(place: ResourceSpec) -> str:
    """Return the log line for replicas whose resources are not free yet."""
    name = "GPU" if place.num_gpus else "CPU"
    free, total = (int(totals.get(name, 0)) for totals in (ray.available_resources(), ray.cluster_resources()))
    message = f"waiting until Ray has {place} free on one machine for each, and {free} of {total} {name} are free"
    return f"{message}: end other jobs, or give fewer replicas"

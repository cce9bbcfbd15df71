"""This process's connection to Ray, a cluster's or one of its own. To import this file is to import Ray."""

import os
import signal
import socket
import threading

import ray
from ray.exceptions import RayError

from conf.errors import UserError, shortened
from pipelines.replicas.resources import ResourceSpec

OBJECT_STORE_BYTES = 80 << 20  # all that Ray carries here are frames; it takes no less
REACH_S = 10.0  # for the cluster to be reached
PLACE_S = 5.0  # for a place that is free; then others have it


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


def waiting_for(place: ResourceSpec) -> str:
    """Return a line about replicas that have no such place yet."""
    name = "GPU" if place.num_gpus else "CPU"
    free, there = (int(each.get(name, 0)) for each in (ray.available_resources(), ray.cluster_resources()))
    what = f"waiting until Ray has {place} free on one machine for each, and {free} of {there} {name} are free"
    return f"{what}: end other jobs, or give fewer replicas"

"""Engines in Ray's workers. Ray's settings for its own ports are read when this is imported."""

import asyncio
import os
import socket
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from conf.errors import UserError, shortened
from conf.schema import RunConfig
from pipelines.engine_process.child import LocalChild
from pipelines.engine_process.client import EngineClient
from pipelines.engine_process.suspects import Suspects
from pipelines.replicas.places import Place, place_of
from pipelines.replicas.replicas import Replicas

OBJECT_STORE_BYTES = 80 << 20  # all that Ray carries here are frames; it takes no less
REACH_S = 10.0  # for the cluster to be reached
LOST = "lost its worker of Ray"


class EngineWorker:
    """Holds an engine's process on the machine that Ray has chosen. Its methods are those of `Child`."""

    async def start(self) -> None:
        self._child = await LocalChild.start()

    async def read(self) -> bytes:
        return await self._child.read()

    async def write(self, content: bytes) -> None:
        self._child.write(content)

    async def write_eof(self) -> None:
        self._child.write_eof()

    async def ended(self) -> str:
        return await self._child.ended()


class RayChild:
    """The engine's process in a worker of Ray. The worker ends with it, and it with the worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._unsent = bytearray()
        self._has_ended = False  # whether nothing more will be sent
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, place: Place) -> "RayChild":
        """Start a worker, as soon as there is a place for it, and the process in it. Raises OSError."""
        worker = ray.remote(max_restarts=0, **asdict(place))(EngineWorker).remote()
        try:
            await worker.start.remote()
        except RayError as error:
            ray.kill(worker)
            raise OSError(f"Ray: {shortened(' '.join(str(error).split()))}") from error
        return cls(worker)

    def write(self, content: bytes) -> None:
        """Send bytes without waiting."""
        self._unsent += content
        self._send_soon()

    def write_eof(self) -> None:
        """Ask the process to end."""
        self._has_ended = True
        self._send_soon()

    async def read(self) -> bytes:
        """Return the next bytes, none where the process has closed its end or the worker is lost."""
        try:
            return await self._worker.read.remote()  # type: ignore[no-any-return]
        except RayError:
            return b""

    def kill(self) -> None:
        """End the worker."""
        ray.kill(self._worker)

    async def ended(self) -> str:
        """Wait for the process to end, not for long, and return how it has ended."""
        try:
            return await self._worker.ended.remote()  # type: ignore[no-any-return]
        except RayError:
            return LOST

    async def close(self) -> None:
        """End the worker."""
        self.kill()

    def _send_soon(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send all there is. One call follows the other: Ray does not keep the order of calls that wait together."""
        try:
            while self._unsent:
                content, self._unsent = bytes(self._unsent), bytearray()
                await self._worker.write.remote(content)
            if self._has_ended:
                await self._worker.write_eof.remote()
        except RayError:  # `read` tells
            self._unsent.clear()


def on_ray(run: RunConfig) -> Replicas:
    """Return `serve.replicas` engines in workers of Ray: of the cluster that RAY_ADDRESS names, else of this machine.

    Raises UserError where the machines have not the processors or GPUs.
    """
    _connect(os.environ.get("RAY_ADDRESS"))
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = ([int(each.get(kind, 0)) for each in resources] for kind in ("CPU", "GPU"))
    place = place_of(run, cpus, gpus)
    if not place.num_gpus:
        run = replace(run, device=replace(run.device, threads=place.num_cpus))
    suspects = Suspects()
    clients = [EngineClient(run, partial(RayChild.start, place), suspects) for _ in range(run.serve.replicas)]
    return Replicas(clients, run.serve.batch_size)


def _connect(address: str | None) -> None:
    """Begin a Ray of our own on this machine, or join the cluster at an address, once. Raises UserError."""
    if ray.is_initialized():
        return
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

"""A server's engines in Ray workers."""

import asyncio
import logging
import math
import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from conf.errors import shortened
from conf.schema import RunConfig
from pipelines.ranks.launch import degrees, leave_launcher
from pipelines.replicas.connection import PLACE_S, connect, waiting_for
from pipelines.replicas.cores import Cores
from pipelines.replicas.engine_process.child import LocalChild
from pipelines.replicas.engine_process.client import EngineClient
from pipelines.replicas.engine_process.suspects import Suspects
from pipelines.replicas.replicas import Replicas
from pipelines.replicas.resources import ResourceSpec, resources_of

log = logging.getLogger(__name__)

LOST = "lost its worker of Ray"


class EngineWorker:
    """Holds an engine's process on the machine that Ray has chosen. It has the methods of `Child`."""

    async def start(self, num_cpus: int) -> None:
        """Start the process on CPUs that no other replica has, if enough are free."""
        leave_launcher(os.environ)  # a launcher may have started Ray
        self._cores = Cores(num_cpus)
        os.sched_setaffinity(0, self._cores.cpus)  # the child process inherits this thread's affinity
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
    """An engine's process in a Ray worker. Worker and process end together."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._unsent = bytearray()
        self._has_ended = False  # whether nothing more will be sent
        self._sending: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, place: ResourceSpec) -> "RayChild":
        """Start a worker and its process as soon as the cluster has the resources. Raises OSError."""
        worker = ray.remote(max_restarts=0, **asdict(place))(EngineWorker).remote()
        started = asyncio.ensure_future(worker.start.remote(place.num_own_cpus))
        try:
            if not (await asyncio.wait([started], timeout=PLACE_S))[0]:
                log.warning("a replica has not started yet: %s", waiting_for(place))
            await started
        except RayError as error:
            ray.kill(worker)
            raise OSError(f"Ray: {shortened(' '.join(str(error).split()))}") from error
        return cls(worker)

    def write(self, content: bytes) -> None:
        """Send bytes without waiting."""
        self._unsent += content
        self._send_soon()

    def write_eof(self) -> None:
        self._has_ended = True
        self._send_soon()

    async def read(self) -> bytes:
        """Return the next bytes; empty if the process has closed its end or the worker is lost."""
        try:
            return await self._worker.read.remote()  # type: ignore[no-any-return]
        except RayError:
            return b""

    def kill(self) -> None:
        ray.kill(self._worker)

    async def ended(self) -> str:
        """Wait for the process to end, for a limited time, and return how it ended."""
        try:
            return await self._worker.ended.remote()  # type: ignore[no-any-return]
        except RayError:
            return LOST

    async def close(self) -> None:
        self.kill()

    def _send_soon(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        """Send all buffered bytes, one call after another: Ray does not keep the order of concurrent calls."""
        try:
            while self._unsent:
                content, self._unsent = bytes(self._unsent), bytearray()
                await self._worker.write.remote(content)
            if self._has_ended:
                await self._worker.write_eof.remote()
        except RayError:  # `read` reports the loss
            self._unsent.clear()


def on_ray(run: RunConfig) -> Replicas:
    """Return `serve.replicas` engines in Ray workers, on the cluster at RAY_ADDRESS, else on this machine.

    Raises UserError if the machines lack the CPUs or GPUs.
    """
    num_ranks = math.prod(degrees(run.parallel, None))
    place = resources_of("serve.replicas", run.serve.replicas, run.device, *connect(), num_ranks)
    run = replace(run, device=place.device(run.device, num_ranks))
    suspects = Suspects()
    clients = [EngineClient(run, partial(RayChild.start, place), suspects) for _ in range(run.serve.replicas)]
    return Replicas(clients, run.serve.batch_size)

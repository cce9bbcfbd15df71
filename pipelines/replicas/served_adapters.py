"""The adapters that a server's requests may name, and their loading and unloading while the server runs."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from conf.errors import list_known_names
from pipelines.replicas.engine_process.client import EngineRefused, RemoteEngine
from pipelines.replicas.engine_process.frames import LoadAdapter


class Reason(Enum):
    invalid = "invalid"  # a value that is not allowed
    missing = "missing"  # an adapter that does not exist
    busy = "busy"  # a name that is being loaded or unloaded; a later request may succeed


class AdapterRefused(Exception):
    """An adapter cannot be loaded or unloaded. `field`: the field of the request that is wrong."""

    def __init__(self, message: str, field: str, reason: Reason = Reason.invalid) -> None:
        super().__init__(message)
        self.message, self.field, self.reason = message, field, reason


@dataclass(eq=False)
class ServedAdapter:
    """One version of an adapter. A request that has begun with it keeps it."""

    name: str
    root: str
    """Path of its folder, as it was given."""
    engine_name: str
    """Name in the engine, which no other version has."""
    is_pinned: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _num_requests: int = 0
    _is_idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._is_idle.set()

    def began(self) -> None:
        """Count a request, which must call `done`."""
        self._num_requests += 1
        self._is_idle.clear()

    def done(self) -> None:
        self._num_requests -= 1
        if not self._num_requests:
            self._is_idle.set()

    async def idle(self) -> None:
        """Wait until no request uses it."""
        await self._is_idle.wait()


class ServedAdapters:
    """The adapters by name. A name gets a new version when all engines have it.

    The engines know each version by a name of its own, so that requests in flight finish with their version.
    """

    def __init__(
        self, engine: RemoteEngine, paths: Mapping[str, str], below: list[str], max_pinned: int, other_names: list[str]
    ) -> None:
        """`paths`: the adapters that the engines load with their model. `below`: the folders of further adapters.

        `other_names`: names that are not free for adapters.
        """
        self._engine, self._paths = engine, paths
        self._adapters = {name: ServedAdapter(name, path, name) for name, path in paths.items()}
        self._below, self._max_pinned, self._other_names = below, max_pinned, other_names
        self._num_versions = 0
        self._changing: set[str] = set()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def present(self) -> list[ServedAdapter]:
        """The adapters in the order of their names, without adapters that restarted engines could not load again."""
        info, adapters = self._engine.info, sorted(self._adapters.values(), key=lambda adapter: adapter.name)
        return [adapter for adapter in adapters if info is None or adapter.engine_name in info.adapters]

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter of this name, if it is present."""
        adapter, info = self._adapters.get(name), self._engine.info
        return adapter if adapter and (info is None or adapter.engine_name in info.adapters) else None

    async def load(self, name: str, path: str, replaces: bool, is_pinned: bool) -> None:
        """Load an adapter in all engines. New requests use it from then on. `replaces`: whether the name may be in use.

        Raises AdapterRefused, and EngineGone without an engine. Then the adapters are as before.
        """
        with self._change(name):
            old = self.find(name)
            if name in self._other_names or (old and not replaces):
                remedy = "give load_inplace=true, or another name" if old else "give another name"
                raise AdapterRefused(f"lora_name={name} is in use: {remedy}", "lora_name")
            if is_pinned:
                self._check_pinned(name)
            new = ServedAdapter(name, path, self._new_engine_name(name), is_pinned)
            try:
                await self._engine.load_adapter(LoadAdapter(0, new.engine_name, path, self._below, is_pinned))
            except EngineRefused as error:
                reason = Reason.missing if error.is_missing else Reason.invalid
                raise AdapterRefused(error.message, "lora_path", reason) from error
            self._adapters[name] = new
        if old is not None:
            release = asyncio.create_task(self._release(old))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def unload(self, name: str) -> None:
        """Unload an adapter. New requests do not find it. Returns after its requests have finished.

        Raises AdapterRefused.
        """
        with self._change(name):
            if (adapter := self.find(name)) is None:
                names = [adapter.name for adapter in self.present]
                known = list_known_names(names, name) if names else "there are none"
                raise AdapterRefused(f"lora_name={name} does not exist: {known}", "lora_name", Reason.missing)
            del self._adapters[name]
            await self._release(adapter)

    async def _release(self, adapter: ServedAdapter) -> None:
        await adapter.idle()
        await self._engine.unload_adapter(adapter.engine_name)

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        if name in self._changing:
            message = f"lora_name={name} is being loaded or unloaded: send the request again"
            raise AdapterRefused(message, "lora_name", Reason.busy)
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    def _check_pinned(self, name: str) -> None:
        num_pinned = sum(adapter.is_pinned for adapter in self.present if adapter.name != name)
        if num_pinned >= self._max_pinned:
            problem = f"{num_pinned} adapters are pinned, and one slot of model.max_adapters must remain"
            raise AdapterRefused(f"pinned=true is not allowed: {problem}: give a larger model.max_adapters", "pinned")

    def _new_engine_name(self, name: str) -> str:
        while True:
            self._num_versions += 1
            if (engine_name := f"{name}#{self._num_versions}") not in self._paths:
                return engine_name

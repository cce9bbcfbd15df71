"""The adapters that an engine's process must have, as the HTTP process keeps them, and the changes without an answer."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from pipelines.replicas.engine_process.frames import AdapterChanged, LoadAdapter, Ready, UnloadAdapter, encode

log = logging.getLogger(__name__)

Answer = asyncio.Future[AdapterChanged]
Write = Callable[[bytes], None]


class AdapterChanges:
    """Sends changes of the adapters, and repeats them after a restart of the process. For one event loop."""

    def __init__(self, adapters: Mapping[str, str], on_lost: Callable[[], None]) -> None:
        """`adapters`: the paths of the adapters that the process loads with its model, by name.

        `on_lost`: called if a restarted process cannot load an adapter again, after `digests` has changed.
        """
        self._wanted = {name: LoadAdapter(0, name, path) for name, path in adapters.items()}
        self._answers: dict[int, Answer] = {}
        self._num_changes = 0
        self._on_lost = on_lost

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the adapters by name. A name that was just restored may still be lost."""
        return {name: adapter.digest or "" for name, adapter in self._wanted.items()}

    @property
    def are_pending(self) -> bool:
        return bool(self._answers)

    def want(self, adapter: LoadAdapter) -> None:
        """Load this adapter after each restart from now on."""
        self._wanted[adapter.name] = adapter

    def forget(self, name: str) -> None:
        self._wanted.pop(name, None)

    def send(self, change: LoadAdapter | UnloadAdapter, write: Write) -> Answer:
        """Send a change, and return its future answer."""
        self._num_changes += 1
        answer: Answer = asyncio.get_running_loop().create_future()
        self._answers[self._num_changes] = answer
        write(encode(msgspec.structs.replace(change, id=self._num_changes)))
        return answer

    def take(self, frame: AdapterChanged) -> None:
        """Take an answer of the process."""
        answer = self._answers.pop(frame.id, None)
        if answer is not None and not answer.done():  # its caller may have gone
            answer.set_result(frame)

    def lose(self, error: Exception) -> None:
        """End all changes without an answer with this error."""
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # a repeated change has no caller that reads the error

    def restore_all(self, ready: Ready, write: Write) -> None:
        """Give a process that has just loaded its model the adapters that it must have, before any request."""
        for name in ready.adapters.keys() - self._wanted.keys():
            self.send(UnloadAdapter(0, name), write)
        for name, adapter in list(self._wanted.items()):
            if name in ready.adapters:
                self.want(adapter.of(ready.adapters[name]))
            else:
                self.restore(adapter, write)

    def restore(self, adapter: LoadAdapter, write: Write) -> None:
        """Load an adapter again, or for the first time in one of several processes. A failure is logged."""
        self.send(adapter, write).add_done_callback(partial(self._restored, adapter.name))

    def _restored(self, name: str, answer: Answer) -> None:
        if answer.cancelled() or answer.exception() is not None or (error := answer.result().error) is None:
            return
        log.error("an engine that was restarted has lost the adapter %s: %s", name, error)
        self.forget(name)
        self._on_lost()

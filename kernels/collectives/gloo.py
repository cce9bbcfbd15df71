"""Ranks that are processes of several machines, or share a GPU: what they exchange goes over TCP, by gloo, which torch brings with it."""

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from kernels.collectives import RankFailed
from kernels.collectives.torch_group import CONNECT, LOOK_S, STEP, TorchGroup


class Gloo(TorchGroup):
    """A rank's side of a group whose ranks reach each other by TCP. Its collectives are recorded with a CPU's step, and replayed."""

    _sending: tuple[Any, Tensor] | None = None  # gloo's work, with the numbers that it still reads

    def abort(self) -> None:
        super().abort()
        sending = self._sending  # which the thread that sends may replace
        if sending is not None and not sending[0].is_completed():
            self._keep(sending)

    def _connect(self, ranks: Any, address: str) -> Any:
        gloo: Any = ProcessGroupGloo  # torch's types do not name all that it has
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = CONNECT
        group = gloo(ranks, self.rank, self.size, options)
        group._set_default_timeout(STEP)
        return group

    def _near(self, x: Tensor) -> Tensor:
        return x.cpu()

    def _begin(self, begin: Callable[[Any], Any]) -> Any:
        """Return the work that `begin` has begun, once the last one that was not waited for is done. Raises as `_group` does."""
        group = self._group()
        if self._sending is not None:
            self._wait(self._sending[0])
            self._sending = None
        return begin(group)

    def _sent(self, work: Any, numbers: Tensor) -> None:
        self._sending = work, numbers

    def _wait(self, work: Any) -> None:
        """Wait for gloo's work. Raises RankFailed also where this rank is told that another is lost."""
        while True:
            has_ended = work.is_completed()  # asked before: a wait may be over just before the work
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if has_ended:  # with an error: a rank has closed its sockets
                    self._aborted.set()
                if self._aborted.is_set():
                    self._keep(work)
                    raise RankFailed from error

    def _keep(self, work: object) -> None:
        """Never destroy work that others may not answer any more, nor gloo's group, which would wait for them."""
        for kept in (work, self._meeting.result()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

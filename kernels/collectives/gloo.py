"""Collectives over TCP with gloo, which is part of torch. For ranks on several machines, or ranks that share a GPU."""

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo

from kernels.collectives import RankFailed
from kernels.collectives.torch_group import CONNECT, LOOK_S, STEP, TorchGroup


class Gloo(TorchGroup):
    """A rank's side of a group whose ranks communicate over TCP. Its collectives are recorded with a CPU's step and
    replayed."""

    _sending: tuple[Any, Tensor] | None = None  # gloo's work and the tensor that it still reads

    def abort(self) -> None:
        super().abort()
        sending = self._sending  # a local copy, because the sending thread may replace it
        if sending is not None and not sending[0].is_completed():
            self._keep(sending)

    def _connect(self, ranks: Any, address: str) -> Any:
        gloo: Any = ProcessGroupGloo  # torch's type stubs are incomplete
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
        """Start a collective after the previous send has finished. Return its work. Raises as `_group` does."""
        group = self._group()
        if self._sending is not None:
            self._wait(self._sending[0])
            self._sending = None
        return begin(group)

    def _sent(self, work: Any, numbers: Tensor) -> None:
        self._sending = work, numbers

    def _wait(self, work: Any) -> None:
        """Wait for gloo's work. Raises RankFailed also after `abort`."""
        while True:
            has_ended = work.is_completed()  # read first: a wait may time out just before the work ends
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if has_ended:  # the work has failed: another rank has closed its sockets
                    self._aborted.set()
                if self._aborted.is_set():
                    self._keep(work)
                    raise RankFailed from error

    def _keep(self, work: object) -> None:
        """Leak the work and gloo's group: their destructors would wait for ranks that may never answer."""
        for kept in (work, self._meeting.result()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

"""Ranks that are processes which torch's groups join: over TCP, or between GPUs.

T rows, p ranks, E channels, W bytes of a row.
"""

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GatherOptions, PrefixStore, TCPStore

from conf.errors import UserError
from kernels.capture import repeated
from kernels.collectives import RankFailed, check_piece, check_rows

LOOK_S = 0.2  # between two looks at whether another rank has failed
RENDEZVOUS_S = 120.0  # for all ranks to be there
ASK_S = 0.02  # between two looks at who is there
CONNECT = timedelta(seconds=30)  # for ranks that are there to reach each other
STEP = timedelta(days=30)  # a long step is no failure: whoever watches over the ranks says when one is lost


def serve_addresses(host: str) -> TCPStore:
    """Return the store in which ranks find each other, at a free port (`store.port`) of this address."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class TorchGroup(ABC):
    """A rank's side of a group of torch's.

    Numbers cross as bytes, padded to the widest piece, and none is computed with. Ranks are not asked who they are: the network is trusted.
    """

    def __init__(
        self, store: tuple[str, int], name: str, rank: int, size: int, address: str, server: object = None
    ) -> None:
        """Begin to meet the ranks of the group `name`, which reach this one at `address`. `store`: host and port of `serve_addresses`.

        `server`: what that has returned, in the process that has called it.
        """
        self.rank, self.size = rank, size
        self._server = server
        self._aborted = threading.Event()
        self._meeting: Future[Any] = Future()  # torch's group
        threading.Thread(target=self._meet, args=(store, name, address)).start()  # Python's end waits for it

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        check_piece(x, widths, self.rank, self.size)
        out = x.new_empty(x.shape[0], sum(widths))
        repeated(lambda: self._gather(x, widths, out))
        return out

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        check_piece(x, widths, self.rank, self.size)
        out = None if self.rank else x.new_empty(x.shape[0], sum(widths))
        repeated(lambda: self._gather_first(x, widths, out))
        return out

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        check_rows(rows, owners)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        repeated(lambda: self._owned_rows(rows, owners, out))
        return out

    def check(self) -> None:
        if self._aborted.is_set():
            raise RankFailed

    def abort(self) -> None:
        """Let this rank go on where it waits, now and later, with RankFailed. The others notice when its process ends."""
        self._aborted.set()

    @abstractmethod
    def _connect(self, ranks: Any, address: str) -> Any:
        """Return torch's group of the ranks, all of which are there and in the store `ranks`."""

    @abstractmethod
    def _wait(self, work: Any) -> None:
        """Let what follows have the results of torch's work. Raises RankFailed where another rank is lost, if this process waits."""

    @abstractmethod
    def _sent(self, work: Any, numbers: Tensor) -> None:
        """See to it that `numbers` stay until work that gives them to another rank is done."""

    def _near(self, x: Tensor) -> Tensor:
        """Return x where torch's group takes it."""
        return x

    def _meet(self, store: tuple[str, int], name: str, address: str) -> None:
        try:
            ranks = PrefixStore(name, TCPStore(*store, is_master=False, timeout=CONNECT))
            self._wait_for_all(ranks)
            self._meeting.set_result(self._connect(ranks, address))
        except BaseException as error:
            self._meeting.set_exception(error)

    def _wait_for_all(self, ranks: Any) -> None:
        """Return when every rank is there, so that torch, which nothing interrupts, waits for none.

        Raises RankFailed where this rank is told to end or does, and TimeoutError where one has not come.
        """
        ranks.set(f"here {self.rank}", b"")
        end = time.monotonic() + RENDEZVOUS_S
        while not ranks.check([f"here {rank}" for rank in range(self.size)]):
            if self._aborted.wait(ASK_S) or not threading.main_thread().is_alive():
                raise RankFailed
            if time.monotonic() > end:
                raise TimeoutError(f"not all were there within {RENDEZVOUS_S:g} s")

    def _gather(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        own = _padded(self._near(x), max(widths))
        every = own.new_empty(self.size, *own.shape)  # [p, T, W]
        if own.numel():
            self._wait(self._begin(lambda group: group._allgather_base(every.view(-1, own.shape[1]), own)))
        _put_beside(every, widths, out)

    def _gather_first(self, x: Tensor, widths: tuple[int, ...], out: Tensor | None) -> None:
        own, options = _padded(self._near(x), max(widths)), GatherOptions()
        if not own.numel():
            return
        if out is None:
            self._sent(self._begin(lambda group: group.gather([], [own], options)), own)
            return
        every = own.new_empty(self.size, *own.shape)  # [p, T, W]
        self._wait(self._begin(lambda group: group.gather([[*every]], [own], options)))
        _put_beside(every, widths, out)

    def _owned_rows(self, rows: Tensor, owners: Tensor, out: Tensor) -> None:
        width = rows.shape[1]
        every = rows.new_empty(len(rows), self.size * width)
        self._gather(rows, (width,) * self.size, every)
        out.copy_(every.view(len(rows), self.size, width)[torch.arange(len(rows), device=rows.device), owners])

    def _begin(self, begin: Callable[[Any], Any]) -> Any:
        """Return the work that `begin` has begun. Raises as `_group` does."""
        return begin(self._group())

    def _group(self) -> Any:
        """Return torch's group, once its ranks have met. Raises RankFailed, and UserError where they cannot reach each other."""
        while not self._meeting.done():
            self.check()
            with suppress(TimeoutError):
                self._meeting.exception(LOOK_S)
        self.check()
        error = self._meeting.exception()
        if error is not None:
            what = f"rank {self.rank} of {self.size} has not met the others of its group: {error}"
            raise UserError(f"{what}: let machines reach each other at all ports")
        return self._meeting.result()


def _padded(x: Tensor, width: int) -> Tensor:
    """Return a copy of x [T, E'] as bytes [T, W], as if it had `width` channels."""
    whole = x.new_zeros(x.shape[0], width)
    whole[:, : x.shape[1]] = x
    return whole.view(torch.uint8)


def _put_beside(every: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
    """Write the pieces [p, T, W], without what pads them, into out [T, sum(widths)]."""
    pieces = every.view(out.dtype)
    parts = [piece[:, :width] for piece, width in zip(pieces, widths, strict=True)]
    if every.device == out.device:
        torch.cat(parts, dim=1, out=out)
    else:
        out.copy_(torch.cat(parts, dim=1))

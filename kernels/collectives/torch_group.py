"""The base of collectives that use torch's process groups, over TCP or between GPUs.

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

LOOK_S = 0.2  # interval of checks for a failed rank
RENDEZVOUS_S = 120.0  # timeout until all ranks have registered
ASK_S = 0.02  # interval of checks for registered ranks
CONNECT = timedelta(seconds=30)  # timeout until registered ranks have connected
STEP = timedelta(days=30)  # a long step is not a failure: the driver detects lost ranks


def serve_addresses(host: str) -> TCPStore:
    """Return the store in which ranks find each other, at a free port (`store.port`) of this address."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class TorchGroup(ABC):
    """A rank's side of a torch process group.

    Tensors are sent as bytes, padded to the widest piece; the group does no arithmetic. Ranks do not authenticate: the
    network is trusted.
    """

    def __init__(
        self, store: tuple[str, int], name: str, rank: int, size: int, address: str, server: object = None
    ) -> None:
        """Start to connect to the ranks of the group `name`. They reach this rank at `address`. `store`: host and port
        of `serve_addresses`.

        `server`: the result of `serve_addresses`, in the process that called it. It keeps the store alive.
        """
        self.rank, self.size = rank, size
        self._server = server
        self._aborted = threading.Event()
        self._meeting: Future[Any] = Future()  # torch's process group
        # not a daemon thread: Python waits for it at exit
        threading.Thread(target=self._meet, args=(store, name, address)).start()

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
        """Raise RankFailed in every wait of this rank, now and later. Other ranks notice when its process ends."""
        self._aborted.set()

    @abstractmethod
    def _connect(self, ranks: Any, address: str) -> Any:
        """Return torch's process group. All ranks are registered in the store `ranks`."""

    @abstractmethod
    def _wait(self, work: Any) -> None:
        """Make the results of torch's work available to subsequent operations. Raises RankFailed if this process waits
        and another rank is lost."""

    @abstractmethod
    def _sent(self, work: Any, numbers: Tensor) -> None:
        """Keep `numbers` alive until the work that sends them is done."""

    def _near(self, x: Tensor) -> Tensor:
        """Return x on the device that torch's process group requires."""
        return x

    def _meet(self, store: tuple[str, int], name: str, address: str) -> None:
        try:
            ranks = PrefixStore(name, TCPStore(*store, is_master=False, timeout=CONNECT))
            self._wait_for_all(ranks)
            self._meeting.set_result(self._connect(ranks, address))
        except BaseException as error:
            self._meeting.set_exception(error)

    def _wait_for_all(self, ranks: Any) -> None:
        """Wait until every rank has registered, because torch's own wait cannot be interrupted.

        Raises RankFailed after `abort` or when this process exits, and TimeoutError if a rank is missing.
        """
        ranks.set(f"here {self.rank}", b"")
        end = time.monotonic() + RENDEZVOUS_S
        while not ranks.check([f"here {rank}" for rank in range(self.size)]):
            if self._aborted.wait(ASK_S) or not threading.main_thread().is_alive():
                raise RankFailed
            if time.monotonic() > end:
                raise TimeoutError(f"not all ranks registered within {RENDEZVOUS_S:g} s")

    def _gather(self, x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
        piece = _padded(self._near(x), max(widths))
        pieces = piece.new_empty(self.size, *piece.shape)  # [p, T, W]
        if piece.numel():
            self._wait(self._begin(lambda group: group._allgather_base(pieces.view(-1, piece.shape[1]), piece)))
        _concatenate(pieces, widths, out)

    def _gather_first(self, x: Tensor, widths: tuple[int, ...], out: Tensor | None) -> None:
        piece, options = _padded(self._near(x), max(widths)), GatherOptions()
        if not piece.numel():
            return
        if out is None:
            self._sent(self._begin(lambda group: group.gather([], [piece], options)), piece)
            return
        pieces = piece.new_empty(self.size, *piece.shape)  # [p, T, W]
        self._wait(self._begin(lambda group: group.gather([[*pieces]], [piece], options)))
        _concatenate(pieces, widths, out)

    def _owned_rows(self, rows: Tensor, owners: Tensor, out: Tensor) -> None:
        width = rows.shape[1]
        all_rows = rows.new_empty(len(rows), self.size * width)
        self._gather(rows, (width,) * self.size, all_rows)
        out.copy_(all_rows.view(len(rows), self.size, width)[torch.arange(len(rows), device=rows.device), owners])

    def _begin(self, begin: Callable[[Any], Any]) -> Any:
        return begin(self._group())

    def _group(self) -> Any:
        """Return torch's process group after its ranks have connected. Raises RankFailed, and UserError if they cannot
        connect."""
        while not self._meeting.done():
            self.check()
            with suppress(TimeoutError):
                self._meeting.exception(LOOK_S)
        self.check()
        error = self._meeting.exception()
        if error is not None:
            problem = f"rank {self.rank} of {self.size} has not met the other ranks of its group: {error}"
            raise UserError(f"{problem}: let machines reach each other at all ports")
        return self._meeting.result()


def _padded(x: Tensor, width: int) -> Tensor:
    """Return a copy of x [T, E'] as bytes [T, W], padded to `width` channels."""
    padded = x.new_zeros(x.shape[0], width)
    padded[:, : x.shape[1]] = x
    return padded.view(torch.uint8)


def _concatenate(pieces: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
    """Write the pieces [p, T, W], without padding, into out [T, sum(widths)]."""
    typed_pieces = pieces.view(out.dtype)
    parts = [piece[:, :width] for piece, width in zip(typed_pieces, widths, strict=True)]
    if pieces.device == out.device:
        torch.cat(parts, dim=1, out=out)
    else:
        out.copy_(torch.cat(parts, dim=1))

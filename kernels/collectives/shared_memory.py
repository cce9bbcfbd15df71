"""Collectives through shared memory. For ranks that are processes of one machine.

T rows, p ranks, E channels.
"""

import ctypes
import fcntl
import mmap
import os

import torch
from torch import Tensor

from kernels import build
from kernels.collectives import RankFailed, check_piece, check_rows


def create_shared_memory(library: build.Library, size: int, num_groups: int = 1) -> int:
    """Return the file descriptor of shared memory for groups of at most `size` ranks. It has no name and is freed with
    its last user.

    Pages are allocated when they are written. Raises ValueError if `size` exceeds the maximum number of ranks.
    """
    num_bytes = library.shared_bytes(size)
    if not num_bytes:
        raise ValueError(f"{size} ranks are more than shared memory holds")
    fd = os.memfd_create("quintet-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_groups * num_bytes)
    # Without the seals a rank could shrink the file and kill other ranks by SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class SharedMemory:
    """A rank's side of a group whose ranks map the same memory. Its collectives are recorded with a step and replayed."""

    def __init__(self, library: build.Library, fd: int, rank: int, size: int, spins: bool, offset: int = 0) -> None:
        """Map the memory of `create_shared_memory` from `offset` on. `spins`: whether a waiting rank spins for 200 us
        before it sleeps."""
        self.rank, self.size, self._spins = rank, size, spins
        self._library, self._slot_bytes = library, library.shared_slot_bytes()
        self._map = torch.frombuffer(mmap.mmap(fd, library.shared_bytes(size), offset=offset), dtype=torch.uint8)
        self._address = self._map.data_ptr()
        # recorded calls point to these arrays
        self._row_bytes: dict[tuple[int, ...], ctypes.Array[ctypes.c_int64]] = {}

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        out = x.new_empty(x.shape[0], sum(widths))
        self._gather(x, widths, out)
        return out

    def gather_first(self, x: Tensor, widths: tuple[int, ...]) -> Tensor | None:
        if self.rank == 0:
            return self.gather(x, widths)
        self._gather(x, widths, None)
        return None

    def owned_rows(self, rows: Tensor, owners: Tensor) -> Tensor:
        check_rows(rows, owners)
        rows, owners, out = rows.contiguous(), owners.contiguous(), torch.empty_like(rows)
        row_bytes = self._checked_row(rows.shape[1] * rows.element_size())
        self._library.shared_owned_rows(
            self._address,
            self.rank,
            self.size,
            self._spins,
            rows.data_ptr(),
            len(rows),
            row_bytes,
            owners.data_ptr(),
            out.data_ptr(),
        )
        return out

    def check(self) -> None:
        if self._library.shared_aborted(self._address):
            raise RankFailed

    def abort(self) -> None:
        """Release all waiting ranks, now and later. Their results are invalid, and `check` raises."""
        self._library.shared_abort(self._address)

    def _gather(self, x: Tensor, widths: tuple[int, ...], out: Tensor | None) -> None:
        check_piece(x, widths, self.rank, self.size)
        x = x.contiguous()
        key = (x.element_size(), *widths)
        if key not in self._row_bytes:
            num_bytes = [self._checked_row(width * x.element_size()) for width in widths]
            self._row_bytes[key] = (ctypes.c_int64 * len(widths))(*num_bytes)
        self._library.shared_gather(
            self._address,
            self.rank,
            self.size,
            self._spins,
            x.data_ptr(),
            len(x),
            ctypes.addressof(self._row_bytes[key]),
            None if out is None else out.data_ptr(),
        )

    def _checked_row(self, num_bytes: int) -> int:
        if num_bytes > self._slot_bytes:
            raise ValueError(
                f"a row of {num_bytes} bytes is more than the {self._slot_bytes} that ranks exchange at once"
            )
        return num_bytes

"""Collectives between GPUs with NCCL, which is part of torch's CUDA builds. For ranks that have one GPU each."""

from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.collectives.torch_group import STEP, TorchGroup


class Nccl(TorchGroup):
    """A rank's side of a group in which each rank uses its current GPU. Its collectives are captured in CUDA graphs.

    The GPU waits for other ranks; this process does not. Each rank has its own GPU. The groups of a process connect one
    after the other, in the order of their creation: while one group connects, the GPU may be waiting for its ranks, so
    another group could not make progress.
    """

    _latest: "ClassVar[Future[Any] | None]" = None  # the connection of the latest group of this process

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of TorchGroup."""
        self._earlier = Nccl._latest
        super().__init__(*arguments)
        Nccl._latest = self._meeting

    def abort(self) -> None:
        super().abort()
        if self._meeting.done() and self._meeting.exception() is None:
            with suppress(RuntimeError):  # the group has already failed
                self._meeting.result().abort()  # otherwise the GPU waits for a lost rank forever

    def _connect(self, ranks: Any, address: str) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # missing in torch's CPU builds

        if self._earlier is not None:
            wait([self._earlier])
        options = ProcessGroupNCCL.Options()
        options._timeout = STEP
        group: Any = ProcessGroupNCCL(ranks, self.rank, self.size, options)  # torch's type stubs are incomplete
        byte = torch.zeros(1, dtype=torch.uint8, device="cuda")
        # connects the ranks, which is impossible during a graph capture
        group._allgather_base(byte.new_empty(self.size), byte).wait()
        torch.cuda.synchronize()
        return group

    def _wait(self, work: Any) -> None:
        work.wait()  # makes the current stream wait

    def _sent(self, work: Any, numbers: Tensor) -> None:
        self._wait(work)  # a captured graph must join all work that it starts

"""Ranks that have a GPU each: what they exchange goes between the GPUs, by NCCL, which torch's builds for CUDA bring with them."""

from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernels.collectives.torch_group import STEP, TorchGroup


class Nccl(TorchGroup):
    """A rank's side of a group whose ranks compute on the current GPU of each. Its collectives are captured with a CUDA graph.

    The GPU waits for other ranks, and not this process. No two ranks have one GPU. Groups of a process connect one after the other, in the
    order in which they were made: while one does, the GPU may wait for its ranks, and another could not go on.
    """

    _latest: "ClassVar[Future[Any] | None]" = None  # the meeting of the group that this process has made last

    def __init__(self, *arguments: Any) -> None:
        """Takes the arguments of TorchGroup."""
        self._earlier = Nccl._latest
        super().__init__(*arguments)
        Nccl._latest = self._meeting

    def abort(self) -> None:
        super().abort()
        if self._meeting.done() and self._meeting.exception() is None:
            with suppress(RuntimeError):  # of a group that has failed
                self._meeting.result().abort()  # else a GPU waits for a lost rank for ever

    def _connect(self, ranks: Any, address: str) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # which torch's builds for a CPU have not

        if self._earlier is not None:
            wait([self._earlier])
        options = ProcessGroupNCCL.Options()
        options._timeout = STEP
        group: Any = ProcessGroupNCCL(ranks, self.rank, self.size, options)  # torch's types do not name all that it has
        own = torch.zeros(1, dtype=torch.uint8, device="cuda")
        group._allgather_base(own.new_empty(self.size), own).wait()  # connects them: a graph being captured cannot
        torch.cuda.synchronize()
        return group

    def _wait(self, work: Any) -> None:
        work.wait()  # so does the stream

    def _sent(self, work: Any, numbers: Tensor) -> None:
        self._wait(work)  # a graph ends with all that it has begun

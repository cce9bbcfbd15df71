"""Ranks that have a GPU each: what they exchange goes between the GPUs, by NCCL, which torch's builds for CUDA bring with them."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels.collectives.torch_group import STEP, TorchGroup


class Nccl(TorchGroup):
    """A rank's side of a group whose ranks compute on the current GPU of each. Its collectives are captured with a CUDA graph.

    The GPU waits for other ranks, and not this process. No two ranks have one GPU.
    """

    def abort(self) -> None:
        super().abort()
        if self._meeting.done() and self._meeting.exception() is None:
            with suppress(RuntimeError):  # of a group that has failed
                self._meeting.result().abort()  # else a GPU waits for a lost rank for ever

    def _connect(self, ranks: Any, address: str) -> Any:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # which torch's builds for a CPU have not

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

"""CUDA graphs: a computation is recorded once on a GPU, then launched as a whole on the current contents of its inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def _no_waits() -> Iterator[None]:
    """Make a synchronisation with the GPU raise RuntimeError.

    It would also raise during the recording, but would leave torch's allocator in the middle of a capture.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphPool:
    """Memory that graphs share, because they never run at the same time. Capture the largest graph first: the smaller
    ones then fit into its memory."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record a computation. Return the function that replays it on the current contents of its inputs.

        `compute` runs three times: once to compile kernels and let libraries allocate memory, once with an error for
        each synchronisation, once recorded. The caller owns inputs and outputs, whose addresses must not change. Raises
        RuntimeError if a graph cannot hold the computation, for example because it waits for the GPU; no capture is
        left open then.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            compute()
            with _no_waits():
                compute()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._handle)
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # it only repeats that an earlier call failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph.replay

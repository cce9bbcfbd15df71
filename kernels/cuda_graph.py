"""CUDA graphs: a computation recorded once on a GPU, and launched again as a whole on what its inputs hold by then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def _no_waits() -> Iterator[None]:
    """A wait for the GPU raises RuntimeError here. While recording it would too, but leave torch's allocator amid a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class GraphPool:
    """Memory that graphs share because no two of them run at once. Where the largest is captured first, the others fit into it."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Record a computation, and return what repeats it on what its inputs hold by then.

        It is computed once, so that kernels are compiled and libraries have their memory; again with an error for each wait; then recorded.
        Inputs and outputs are the caller's, and stay where they are. Raises RuntimeError for what a graph cannot hold, such as a wait for
        the GPU; then nothing is left recording.
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
                with suppress(RuntimeError):  # which says only that something was wrong before
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.synchronize()
        return graph.replay

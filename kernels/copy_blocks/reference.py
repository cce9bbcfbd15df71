"""C copies."""

from torch import Tensor

from kernels.kv_format import PagedVectors


def copy_blocks(key_cache: PagedVectors, value_cache: PagedVectors, sources: Tensor, targets: Tensor) -> None:
    """Copy block `sources[i]` to block `targets[i]`, in place.

    sources and targets [C] int64; the targets are distinct. A block may be both source and target: all blocks are read
    before any block is written.
    """
    for stored in key_cache.tensors + value_cache.tensors:
        stored[targets] = stored[sources]

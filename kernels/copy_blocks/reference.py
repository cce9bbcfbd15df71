"""C copies."""

from torch import Tensor

from kernels.kv_format import PagedVectors


def copy_blocks(key_cache: PagedVectors, value_cache: PagedVectors, sources: Tensor, targets: Tensor) -> None:
    """Block `targets[i]` becomes a copy of what block `sources[i]` was before the call. In place.

    sources and targets [C] int64, the targets all different. A block may be both: all are read before any is written.
    """
    for stored in key_cache.tensors + value_cache.tensors:
        stored[targets] = stored[sources]

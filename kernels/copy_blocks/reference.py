"""N blocks of B slots, G key/value heads, D channels per head."""

from torch import Tensor


def copy_blocks(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Block `targets[i]` becomes a copy of what block `sources[i]` was before the call. In place.

    Caches [N, B, G, D]; sources and targets [C] int64, the targets all different. A block may be both: all are read before any is written.
    """
    key_cache[targets] = key_cache[sources]
    value_cache[targets] = value_cache[sources]

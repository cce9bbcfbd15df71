"""T tokens, N blocks of B slots, G key/value heads, D channels per head."""

from torch import Tensor


def kv_store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write token t's key and value to slot `slots[t]`, which is block * B + offset. In place.

    key and value [T, G, D]; caches [N, B, G, D] in the same dtype; slots [T] int64, all different.
    """
    key_cache.flatten(0, 1)[slots] = key
    value_cache.flatten(0, 1)[slots] = value

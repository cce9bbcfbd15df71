"""Every format of the cache for kernel tests, including formats with static scales."""

import torch

from kernels.kv_format import FORMATS, STATIC_FORMATS, KVFormat

NAMES = [*FORMATS, *(f"{name} static" for name in STATIC_FORMATS)]
CHOSEN_FOR = 2.5  # largest magnitude of static scales: about one normal number in eighty is beyond it


def formats_of(name: str, num_heads: int, device: str = "cpu") -> tuple[KVFormat, KVFormat]:
    """Return the formats of keys and of values. Static scales differ between heads, and between keys and values."""
    kind = STATIC_FORMATS.get(name.removesuffix(" static"))
    if kind is None or "static" not in name:
        return FORMATS[name]
    largest = {"int8 static": 127, "fp8 static": 448}[name]
    scales = torch.linspace(1, 1.5, 2 * num_heads) * CHOSEN_FOR / largest
    return kind(scales[:num_heads].to(device)), kind(scales[num_heads:].to(device))

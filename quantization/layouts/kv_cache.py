"""The `kv_cache_scheme` of a `quantization_config`, as in the package compressed-tensors 0.20."""

from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.quantization import KVCacheFormat
from models.config import ConfigReader

TYPES = {("int", 8): KVCacheFormat.int8, ("float", 8): KVCacheFormat.fp8}


@dataclass(frozen=True)
class KVCacheScheme:
    """Static scales of keys and values."""

    format: KVCacheFormat
    per_head: bool
    """Whether each head has its own scales. Otherwise a layer has one scale for its keys and one for its values."""


def read_kv_cache_scheme(config: ConfigReader) -> KVCacheScheme | None:
    """Return the scheme in config.json, or None if the KV cache is not quantised.

    Raises UserError for a scheme that is not implemented.
    """
    quantization = config.section("quantization_config")
    method = quantization.raw("quant_method") if quantization else None
    scheme = quantization.section("kv_cache_scheme") if quantization and method == "compressed-tensors" else None
    if scheme is None:
        return None
    number = scheme.get("type", str, "int"), scheme.get("num_bits", int, 8)
    if number not in TYPES:
        raise UserError(f"kv_cache_scheme: {number[0]} of {number[1]} bits is not supported: only int and float of 8")
    scheme.expect("symmetric", (True,), True)
    scheme.expect("dynamic", (False,), False)
    strategy = scheme.expect("strategy", ("tensor", "attn_head"), "tensor")
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):  # how the scales were calibrated
        scheme.raw(key)
    for key in ("group_size", "block_structure", "actorder"):
        scheme.expect(key, (None,), None)
    if unread := scheme.unread():
        raise UserError(f"kv_cache_scheme has settings that are not known: {', '.join(unread)}")
    return KVCacheScheme(TYPES[number], strategy == "attn_head")


def write_kv_cache_scheme(format: KVCacheFormat) -> dict[str, Any]:
    """Return the `kv_cache_scheme` of a KV cache with scales per head."""
    (type, bits) = next(number for number, named in TYPES.items() if named is format)
    return {"num_bits": bits, "type": type, "symmetric": True, "strategy": "attn_head", "dynamic": False}

"""Writes new keys and values into the paged cache."""

from kernels.kv_store.reference import kv_store

__all__ = ["kv_store"]

"""Writes new keys and values into the paged cache."""

from kernels.copy_blocks.reference import copy_blocks

__all__ = ["copy_blocks"]

"""Copies of whole blocks of the paged cache."""

from kernels.copy_blocks.reference import copy_blocks

__all__ = ["copy_blocks"]

"""Rotary position embedding, applied to queries and keys."""

from kernels.rope.reference import rope

__all__ = ["rope"]

"""Causal attention over the paged cache, for prefill and decode alike."""

from kernels.paged_attention.reference import paged_attention

__all__ = ["paged_attention"]

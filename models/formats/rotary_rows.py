"""Convert between the two row orders of rotary embeddings.

The rows of a pair are adjacent (Meta, llama.cpp), or half a head apart (Hugging Face and our kernels).
"""

from torch import Tensor


def deinterleave_rows(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows with pairs half a head apart. `tensor`: [heads * D, ...] with adjacent pairs."""
    ordered: Tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return ordered


def interleave_rows(tensor: Tensor, heads: int) -> Tensor:
    """Return the rows with adjacent pairs. `tensor`: [heads * D, ...] with pairs half a head apart."""
    ordered: Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return ordered

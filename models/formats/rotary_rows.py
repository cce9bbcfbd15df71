"""The two orders of the rows that rotary embedding turns: a pair's two next to each other (Meta, llama.cpp), or half a head apart
(Hugging Face, and our kernels).
"""

from torch import Tensor


def half_apart(tensor: Tensor, heads: int) -> Tensor:
    """tensor [heads*D, ...], a pair's rows next to each other."""
    ordered: Tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # type: ignore[no-untyped-call]
    return ordered


def side_by_side(tensor: Tensor, heads: int) -> Tensor:
    """tensor [heads*D, ...], a pair's rows half a head apart."""
    ordered: Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)  # type: ignore[no-untyped-call]
    return ordered

"""How the keys and values of all tokens lie in the paged cache: the layout that kv_store, paged_attention and copy_blocks share.

N blocks of B slots, G key/value heads, D channels per head.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class KVFormat(Protocol):
    """What is stored of a vector of D channels. Each vector is encoded on its own, so nothing depends on a token's company."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """The tensors to store, each [..., *] for vectors [..., D]."""

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Vectors from what `encode` gave: [..., D], or wider where D was padded."""


class Unquantised:
    """Vectors as they are."""

    def encode(self, vectors: Tensor) -> tuple[Tensor, ...]:
        return (vectors,)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0]


@dataclass(frozen=True)
class PagedVectors:
    """The keys, or the values, of one layer."""

    tensors: tuple[Tensor, ...]  # each [N, B, G, *], as `format` encodes
    format: KVFormat
    channels: int  # D; of less than what is stored the first ones are meant
    dtype: torch.dtype  # of the vectors when they are read


def allocate(
    format: KVFormat, size: tuple[int, int, int], channels: int, dtype: torch.dtype, device: torch.device
) -> PagedVectors:
    """A pool of `size` [N, B, G]. Not initialised: nothing is read before it is written, and on a CPU no page is taken before
    (torch.zeros would take them all)."""
    one = format.encode(torch.empty(channels, dtype=dtype, device="meta"))
    tensors = tuple(torch.empty((*size, *part.shape), dtype=part.dtype, device=device) for part in one)
    return PagedVectors(tensors, format, channels, dtype)

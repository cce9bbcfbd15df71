"""R rows, V tokens in the vocabulary."""

import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    """Return the number of int32 words per row of a bitmask."""
    return -(-vocab_size // 32)


def mask_logits(logits: Tensor, bitmask: Tensor) -> None:
    """Set logits [R, V] of any floating dtype to -inf, in place, where the bitmask int32 [R, ceil(V / 32)] has a 0.
    Other logits keep their bits.

    Token v of a row is bit v % 32, counted from the lowest bit, of word v // 32. Bits beyond the vocabulary are
    ignored.
    """
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device)  # [R, words, 32]
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~allowed, -torch.inf)

"""Pack small codes into int32 words as compressed-tensors, GPTQ and AWQ do: lowest bits first, unsigned.

R rows, C codes per row.
"""

import torch
from torch import Tensor

WORD = 32  # bits of an int32


def num_words(count: int, bits: int) -> int:
    return -(-count * bits // WORD)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes int8 [R, C] into int32 [R, ceil(C * bits / 32)]. 2^(bits-1) is added to each code first."""
    per_word = WORD // bits
    unsigned = codes.int() + 2 ** (bits - 1)
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    words: Tensor = (padded << torch.arange(0, WORD, bits, dtype=torch.int32)).sum(2, dtype=torch.int32)
    return words


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the signed codes int8 [R, count] that `pack` packed into `words`."""
    unsigned: Tensor = (words.unsqueeze(2) >> torch.arange(0, WORD, bits, dtype=torch.int32)) & (2**bits - 1)
    codes: Tensor = unsigned.flatten(1)[:, :count] - 2 ** (bits - 1)
    return codes.to(torch.int8)

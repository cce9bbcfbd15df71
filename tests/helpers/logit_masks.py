"""Logits, and token masks for them."""

import math

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def masks(rows: int, vocab_size: int) -> Tensor:
    """Return random masks. Some words ban nothing and some everything; bits beyond the vocabulary are random."""
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=torch.Generator().manual_seed(0))
    words[:, ::3], words[:, 1::3] = -1, 0
    return words.roll(1, 1).to(torch.int32)


def logits_of(rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Return logits with infinities and a NaN that has a payload."""
    logits = torch.linspace(-9, 9, rows * vocab_size).to(dtype).view(rows, vocab_size)
    if logits.numel() > 4:
        flat = logits.view(-1)
        flat[1], flat[2] = math.inf, -math.inf
        flat.view(BITS[dtype])[3] = torch.tensor(math.nan, dtype=dtype).view(BITS[dtype]) | 3
    return logits

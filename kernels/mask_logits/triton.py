"""Bans of tokens. One program processes some tokens of a row. R rows, V tokens in the vocabulary."""

import triton
import triton.language as tl
from torch import Tensor

SIZE = 2048


def mask_logits(logits: Tensor, bitmask: Tensor) -> None:
    rows, vocab_size = logits.shape
    if logits.numel():
        _mask_logits[rows, triton.cdiv(vocab_size, SIZE)](
            logits,
            bitmask.contiguous(),
            *logits.stride(),
            vocab_size,
            triton.cdiv(vocab_size, 32),
            SIZE=SIZE,
        )


@triton.jit
def _mask_logits(logits, bitmask, row_stride, token_stride, vocab_size, num_words, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = token < vocab_size
    words = tl.load(bitmask + row * num_words + token // 32, mask=inside, other=-1)
    banned = inside & ((words >> (token % 32)) & 1 == 0)
    tl.store(logits + row * row_stride + token * token_stride, float("-inf"), mask=banned)

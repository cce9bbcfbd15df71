"""mask_logits against Python's integers, bit by bit."""

import math

import pytest
import torch
from torch import Tensor

from kernels.mask_logits import mask_logits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def masks(rows: int, vocab_size: int) -> Tensor:
    """Random words, of which some ban nothing and some everything; bits after the vocabulary are random, too."""
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=torch.Generator().manual_seed(0))
    words[:, ::3], words[:, 1::3] = -1, 0
    return words.roll(1, 1).to(torch.int32)


def logits_of(rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """With a NaN that has a payload, and infinities."""
    logits = torch.linspace(-9, 9, rows * vocab_size).to(dtype).view(rows, vocab_size)
    if logits.numel() > 4:
        flat = logits.view(-1)
        flat[1], flat[2] = math.inf, -math.inf
        flat.view(BITS[dtype])[3] = torch.tensor(math.nan, dtype=dtype).view(BITS[dtype]) | 3
    return logits


def expected_of(logits: Tensor, bitmask: Tensor) -> Tensor:
    result = logits.clone()
    for row, words in enumerate(bitmask.tolist()):
        for token in range(logits.shape[1]):
            if not (words[token // 32] >> (token % 32)) & 1:
                result[row, token] = -math.inf
    return result


@pytest.mark.usefixtures("any_way", "poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1), (3, 31), (2, 32), (5, 333), (1, 70001)], ids=str)
def test_bans_the_tokens_whose_bit_is_0(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits, bitmask = logits_of(*shape, dtype), masks(*shape)
    expected = expected_of(logits, bitmask)
    mask_logits(logits, bitmask)
    assert torch.equal(logits.view(BITS[dtype]), expected.view(BITS[dtype]))


@pytest.mark.usefixtures("any_way")
def test_rows_apart() -> None:
    """Only the tokens of the view are written, whatever lies between its rows or its columns."""
    for view in (slice(3, 36), slice(3, 69, 2)):
        whole = logits_of(4, 80, torch.float32)
        before, bitmask = whole.clone(), masks(4, 33)
        mask_logits(whole[:, view], bitmask[:, :])
        before[:, view] = expected_of(before[:, view], bitmask)
        assert torch.equal(whole.view(torch.int32), before.view(torch.int32))
    bitmask = masks(4, 80)[:, :2]  # words apart
    logits = logits_of(4, 40, torch.float32)
    expected = expected_of(logits, bitmask)
    mask_logits(logits, bitmask)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@pytest.mark.usefixtures("any_way")
def test_other_shapes_and_dtypes_are_refused() -> None:
    logits = torch.zeros(2, 33)
    with pytest.raises(ValueError, match=r"a bitmask is \[2, 2\] of int32, not \[2, 1\] of torch.int32"):
        mask_logits(logits, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"a bitmask is \[2, 2\] of int32, not \[2, 2\] of torch.int64"):
        mask_logits(logits, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logits are rows of floats, not \[33\]"):
        mask_logits(logits[0], torch.zeros(1, 2, dtype=torch.int32))

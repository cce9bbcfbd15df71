"""mask_logits compared with Python's integers, bit by bit."""

import math

import pytest
import torch
from torch import Tensor

from kernels.mask_logits import mask_logits
from tests.helpers.cases import each
from tests.helpers.logit_masks import BITS, DTYPES, logits_of, masks
from tests.helpers.poison import poisoned
from tests.helpers.ways import any_way


def expected_of(logits: Tensor, bitmask: Tensor) -> Tensor:
    result = logits.clone()
    for row, words in enumerate(bitmask.tolist()):
        banned = [token for token in range(logits.shape[1]) if not (words[token // 32] >> (token % 32)) & 1]
        result[row, banned] = -math.inf
    return result


@any_way
@each("dtype", DTYPES)
@each("shape", [(0, 5), (2, 0), (1, 1), (3, 31), (2, 32), (5, 333), (1, 70001)])
@poisoned()
def test_bans_the_tokens_whose_bit_is_0(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits, bitmask = logits_of(*shape, dtype), masks(*shape)
    expected = expected_of(logits, bitmask)
    mask_logits(logits, bitmask)
    assert torch.equal(logits.view(BITS[dtype]), expected.view(BITS[dtype]))


@any_way
def test_rows_apart() -> None:
    """Only the tokens of the view are written, not the memory between its rows or its columns."""
    for view in (slice(3, 36), slice(3, 69, 2)):
        storage = logits_of(4, 80, torch.float32)
        before, bitmask = storage.clone(), masks(4, 33)
        mask_logits(storage[:, view], bitmask[:, :])
        before[:, view] = expected_of(before[:, view], bitmask)
        assert torch.equal(storage.view(torch.int32), before.view(torch.int32))
    bitmask = masks(4, 80)[:, :2]  # words with a stride
    logits = logits_of(4, 40, torch.float32)
    expected = expected_of(logits, bitmask)
    mask_logits(logits, bitmask)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@any_way
def test_other_shapes_and_dtypes_are_refused() -> None:
    logits = torch.zeros(2, 33)
    with pytest.raises(ValueError, match=r"a bitmask is \[2, 2\] of int32, not \[2, 1\] of torch.int32"):
        mask_logits(logits, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"a bitmask is \[2, 2\] of int32, not \[2, 2\] of torch.int64"):
        mask_logits(logits, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logits are rows of floats, not \[33\]"):
        mask_logits(logits[0], torch.zeros(1, 2, dtype=torch.int32))

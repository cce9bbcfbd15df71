"""The Triton kernel against the reference, to the bit."""

import pytest
import torch

from kernels.mask_logits import reference, triton
from tests.helpers.triton_cases import DEVICE
from tests.kernels.test_mask_logits import BITS, DTYPES, logits_of, masks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 31), (5, 333), (2, 5001)], ids=str)
def test_equals_the_reference(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    expected, bitmask = logits_of(*shape, dtype), masks(*shape)
    found = expected.to(DEVICE, copy=True)
    reference.mask_logits(expected, bitmask)
    triton.mask_logits(found, bitmask.to(DEVICE))
    assert torch.equal(found.cpu().view(BITS[dtype]), expected.view(BITS[dtype]))


def test_rows_apart() -> None:
    whole, bitmask = logits_of(4, 80, torch.float32), masks(4, 33)
    found = whole.to(DEVICE, copy=True)
    reference.mask_logits(whole[:, 3:69:2], bitmask)
    triton.mask_logits(found[:, 3:69:2], bitmask.to(DEVICE))
    assert torch.equal(found.cpu().view(torch.int32), whole.view(torch.int32))

"""The Triton kernel equals the reference bit for bit."""

from itertools import product

import torch

from kernels.mask_logits import reference, triton
from tests.helpers.cases import each
from tests.helpers.logit_masks import BITS, DTYPES, logits_of, masks
from tests.helpers.triton_cases import DEVICE


@each("dtype, shape", product(DTYPES, [(0, 5), (1, 1), (3, 31), (5, 333), (2, 2050)]))
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

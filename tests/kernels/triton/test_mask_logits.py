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
    result = expected.to(DEVICE, copy=True)
    reference.mask_logits(expected, bitmask)
    triton.mask_logits(result, bitmask.to(DEVICE))
    assert torch.equal(result.cpu().view(BITS[dtype]), expected.view(BITS[dtype]))


def test_rows_apart() -> None:
    storage, bitmask = logits_of(4, 80, torch.float32), masks(4, 33)
    result = storage.to(DEVICE, copy=True)
    reference.mask_logits(storage[:, 3:69:2], bitmask)
    triton.mask_logits(result[:, 3:69:2], bitmask.to(DEVICE))
    assert torch.equal(result.cpu().view(torch.int32), storage.view(torch.int32))

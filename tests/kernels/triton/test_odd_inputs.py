"""The cases of tests/kernels/test_odd_inputs.py with the Triton kernels in the operators' places."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.kv_store.triton import kv_store, rope_and_store
from kernels.mask_logits.triton import mask_logits
from kernels.paged_attention.triton import paged_attention
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from kernels.rope.triton import rope
from kernels.sampling.triton import draw
from kernels.swiglu.triton import swiglu
from tests.helpers.triton_cases import DEVICE
from tests.kernels import test_odd_inputs as cases

KERNELS = {
    kernel.__name__: kernel
    for kernel in (add_rms_norm, draw, kv_store, mask_logits, paged_attention, rms_norm, rope, rope_and_store, swiglu)
}
EMPTY = [case for case in cases.EMPTY if case[0] in KERNELS]


@pytest.fixture
def kernels_compute(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def replace() -> None:
        for name, kernel in KERNELS.items():
            monkeypatch.setattr(cases, name, kernel)

    return replace


@pytest.mark.parametrize(("operator", "rows", "channels"), EMPTY)
def test_nothing_to_compute(kernels_compute: Callable[[], None], operator: str, rows: int, channels: int) -> None:
    expected = cases.CASES[operator](rows, channels, torch.clone)
    kernels_compute()
    with torch.device(DEVICE):
        found = cases.CASES[operator](rows, channels, torch.clone)
    assert all(torch.equal(*pair) for pair in zip(map(Tensor.cpu, found), expected, strict=True))


@pytest.mark.parametrize("operator", KERNELS)
def test_numbers_that_lie_apart(kernels_compute: Callable[[], None], operator: str) -> None:
    kernels_compute()
    with torch.device(DEVICE):
        found, expected = (cases.CASES[operator](5, 32, at) for at in (cases.apart, torch.clone))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

"""The cases of tests/kernels/test_odd_inputs.py with the Triton kernels instead of the operators."""

from unittest.mock import patch

import torch
from torch import Tensor

from kernels.gated_rms_norm.triton import gated_rms_norm
from kernels.kv_store.triton import kv_store, rope_and_store
from kernels.mask_logits.triton import mask_logits
from kernels.paged_attention.triton import paged_attention
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from kernels.rope.triton import rope
from kernels.sampling.triton import draw
from kernels.sigmoid_gate.triton import sigmoid_gate
from kernels.swiglu.triton import swiglu
from tests.helpers import odd_inputs as cases
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        add_rms_norm,
        draw,
        gated_rms_norm,
        kv_store,
        mask_logits,
        paged_attention,
        rms_norm,
        rope,
        rope_and_store,
        sigmoid_gate,
        swiglu,
    )
}
EMPTY = [case for case in cases.EMPTY if case[0] in KERNELS]


@each("operator, rows, channels", EMPTY)
def test_nothing_to_compute(operator: str, rows: int, channels: int) -> None:
    expected = cases.CASES[operator](rows, channels, torch.clone)
    with torch.device(DEVICE), patch.multiple(cases, **KERNELS):
        result = cases.CASES[operator](rows, channels, torch.clone)
    assert all(torch.equal(*pair) for pair in zip(map(Tensor.cpu, result), expected, strict=True))


@each("operator", KERNELS)
def test_numbers_that_lie_apart(operator: str) -> None:
    with torch.device(DEVICE), patch.multiple(cases, **KERNELS):
        result, expected = (cases.CASES[operator](5, 32, at) for at in (cases.apart, torch.clone))
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))

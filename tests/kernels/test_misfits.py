"""Arguments that do not belong together: the C++ kernels, which would read or write beyond them, are not asked.

Torch's operators say what becomes of them: an error, or what the reference makes of one number for all.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels import build
from kernels import linear as products
from kernels.gelu import gelu_tanh
from kernels.kv_store import kv_store, rope_and_store
from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.linear import WeightGroup, grouped_matmul, linear, matmul, pack
from kernels.moe import combine_rows, group_rows
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantize
from kernels.rope import rope, rope_angles
from tests.kernels.test_odd_inputs import caches, waves

INT32, HALF, DOUBLE = torch.int32, torch.float16, torch.float64
FAR = 4096  # numbers: what is read this far beyond a tensor is not what is there by chance


def stored(
    key: Tensor, value: Tensor, slots: Tensor, angles: Tensor | None = None, norm: Tensor | None = None
) -> Sequence[Tensor]:
    keys, values = caches(16)
    if angles is None:
        kv_store(key, value, keys, values, slots)
        return keys.tensors + values.tensors
    query = rope_and_store(waves(3, 4, 16), key, value, angles, angles, keys, values, slots, False, norm, None, 1e-5)
    return query, *keys.tensors, *values.tensors


def attended(**other: Tensor) -> Sequence[Tensor]:
    """Three sequences of one new token, of which one argument is another."""
    keys, values = caches(16)
    fitting = {
        "query": waves(3, 4, 16),
        "block_tables": torch.tensor([[2, 0]] * 3),
        "query_starts": torch.arange(4),
        "context_lengths": torch.arange(3) + 4,
        "alibi_slopes": waves(4),
        "prefix_lengths": torch.arange(3),
    }
    given = fitting | other
    options = None, None, given.pop("alibi_slopes"), given.pop("prefix_lengths")
    query = given.pop("query")
    return [paged_attention(query, keys, values, *given.values(), 0.3, *options)]


MISFITS: dict[str, Callable[[], Sequence[Tensor]]] = {
    "a weight for each head, and rows for one": lambda: [linear(waves(4, 2, 8), waves(2, 4, 8))],
    "query heads that no key head has": lambda: attended(query=waves(3, 3, 16), alibi_slopes=waves(3)),
    "norm of fewer weights": lambda: [rms_norm(waves(2, FAR), waves(4), 1e-5)],
    "layer norm of fewer weights": lambda: [layer_norm(waves(2, FAR), waves(4), None, 1e-5)],
    "layer norm of one bias": lambda: [layer_norm(waves(2, FAR), None, waves(1), 1e-5)],
    "layer norm of another dtype": lambda: [layer_norm(waves(2, FAR), waves(FAR).to(HALF), None, 1e-5)],
    "layer norm to codes, fewer weights": lambda: layer_norm_quantize(
        waves(2, FAR), waves(4), None, 1e-5, torch.int8, None
    ),
    "gelu beside fewer rows": lambda: [gelu_tanh(waves(FAR, 4), waves(1, 4))],
    "gelu of one row": lambda: [gelu_tanh(waves(FAR))],
    "norm of one weight": lambda: [rms_norm(waves(2, FAR), waves(1), 1e-5)],
    "norm of a sum, fewer weights": lambda: add_rms_norm(waves(2, FAR), waves(2, FAR), waves(4), 1e-5),
    "norm to codes, fewer weights": lambda: rms_norm_quantize(waves(2, FAR), waves(4), 1e-5, torch.int8, None),
    "rope of fewer angles": lambda: [rope(waves(FAR, 2, 8), waves(1, 4), waves(1, 4))],
    "rope of more angles than channels": lambda: [rope(waves(5, 2, 8), waves(5, 40), waves(5, 40))],
    "rope of fewer sines": lambda: [rope(waves(FAR, 2, 8), waves(FAR, 4), waves(1, 1))],
    "rope of sines of another dtype": lambda: [rope(waves(FAR, 2, 8), waves(FAR, 4), waves(FAR, 4).to(HALF))],
    "angles of int32 positions": lambda: rope_angles(torch.arange(9).to(INT32), waves(4), 1.0, torch.float32),
    "angles of float64 frequencies": lambda: rope_angles(torch.arange(9), waves(4).to(DOUBLE), 1.0, torch.float32),
    "more choices than rows": lambda: group_rows(waves(1, 4), torch.zeros(FAR, 2, dtype=torch.int64), 4),
    "int32 places": lambda: [combine_rows(waves(4, 4), waves(2, 2), torch.arange(4).view(2, 2).to(INT32))],
    "fewer weights than places": lambda: [combine_rows(waves(4, 4), waves(1, 1), torch.arange(4).view(2, 2))],
    "stored: int32 slots": lambda: stored(waves(3, 2, 16), waves(3, 2, 16), torch.arange(3).to(INT32)),
    "stored: more slots than rows": lambda: stored(waves(2, 2, 16), waves(2, 2, 16), torch.arange(3)),
    "stored: values of another dtype": lambda: stored(waves(3, 2, 16), waves(3, 2, 16).to(HALF), torch.arange(3)),
    "stored: fewer heads": lambda: stored(waves(3, 1, 16), waves(3, 1, 16), torch.arange(3)),
    "stored: more channels": lambda: stored(waves(3, 2, 32), waves(3, 2, 32), torch.arange(3)),
    "turned and stored: fewer angles": lambda: stored(waves(3, 2, 16), waves(3, 2, 16), torch.arange(3), waves(1, 8)),
    "turned and stored: one weight of a norm": lambda: stored(
        waves(3, 2, 16), waves(3, 2, 16), torch.arange(3), waves(3, 8), waves(1)
    ),
    "attended: other channels": lambda: attended(query=waves(3, 4, 8)),
    "attended: int32 lengths": lambda: attended(context_lengths=(torch.arange(3) + 4).to(INT32)),
    "attended: int32 tables": lambda: attended(block_tables=torch.tensor([[2, 0]] * 3).to(INT32)),
    "attended: fewer tables": lambda: attended(block_tables=torch.tensor([[2, 0]])),
    "attended: fewer slopes": lambda: attended(alibi_slopes=waves(2)),
    "attended: slopes of another dtype": lambda: attended(alibi_slopes=waves(4).to(DOUBLE)),
    "attended: fewer prefixes": lambda: attended(prefix_lengths=torch.arange(1)),
}


def outcome(case: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor] | type[Exception]:
    try:
        return case()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_for_torch_to_judge(
    compiled: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, misfit: str
) -> None:
    found = outcome(MISFITS[misfit])
    monkeypatch.setattr(build, "library", lambda: None)
    expected = outcome(MISFITS[misfit])
    if isinstance(expected, type):
        assert found is expected
    else:
        torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)  # the same operators computed it


@pytest.mark.parametrize("starts", [torch.tensor([0, 2]).to(INT32), torch.tensor([0, 1, 2])])
def test_starts_that_do_not_fit_are_refused(compiled: Callable[[int], None], starts: Tensor) -> None:
    coded = products.pack_codes(torch.ones(20, 8, dtype=torch.int8), torch.ones(20, 1), None, 8)
    assert isinstance(coded, products.IntWeight)
    with pytest.raises(ValueError, match=r"starts \[\d\] of torch.int\d\d for 1 weights"):
        grouped_matmul(torch.ones(2, 8), WeightGroup([pack(torch.ones(20, 8))]), starts)
    with pytest.raises(ValueError, match=r"starts \[\d\] of torch.int\d\d for 1 weights"):
        products.grouped_matmul(torch.ones(2, 8), products.WeightGroup([coded]), starts)


def test_a_weight_on_another_device_is_not_read(compiled: Callable[[int], None]) -> None:
    """Its address is no memory of ours; torch makes of it what it will."""
    assert linear(torch.ones(2, 8), torch.empty(4, 8, device="meta")).shape == (2, 4)


def test_rows_on_another_device_are_refused(compiled: Callable[[int], None]) -> None:
    with pytest.raises(ValueError, match="rows on meta and a weight on cpu"):
        matmul(torch.ones(2, 8, device="meta"), pack(torch.ones(20, 8)))

"""Arguments that do not match each other: they never reach the C++ kernels, which would read or write out of bounds.

torch's operators define the result: an error, or a broadcast.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import build
from kernels import linear as products
from kernels.all_finite import all_finite
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gelu import gelu_tanh
from kernels.kv_format import PagedVectors
from kernels.kv_store import kv_store, rope_and_store
from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.linear import WeightGroup, grouped_matmul, linear, matmul, pack
from kernels.lora import AdapterTable, lora_add
from kernels.moe import combine_rows, group_rows
from kernels.paged_attention import paged_attention
from kernels.quantize_rows import QuantizedActivations
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantize
from kernels.rope import rope, rope_angles
from kernels.sampling import most_likely
from kernels.sigmoid_gate import sigmoid_gate
from kernels.swiglu import swiglu
from tests.helpers.cases import each
from tests.helpers.odd_inputs import caches, waves
from tests.helpers.ways import any_way, compiled, computing

INT32, HALF, DOUBLE = torch.int32, torch.float16, torch.float64
FAR = 4096  # numbers: memory this far beyond a tensor is not read by chance


def stored(
    key: Tensor, value: Tensor, slots: Tensor, angles: Tensor | None = None, norm: Tensor | None = None, **of_keys: int
) -> Sequence[Tensor]:
    keys, values = (replace(cache, **of_keys) if i == 0 else cache for i, cache in enumerate(caches(16)))
    if angles is None:
        kv_store(key, value, keys, values, slots)
        return keys.tensors + values.tensors
    query = rope_and_store(waves(3, 4, 16), key, value, angles, angles, keys, values, slots, False, norm, None, 1e-5)
    return query, *keys.tensors, *values.tensors


def attended(values: PagedVectors | None = None, **other: Tensor) -> Sequence[Tensor]:
    """Call attention on three sequences of one new token, with one argument replaced."""
    keys, own_values = caches(16)
    values = values or own_values
    fitting = {
        "query": waves(3, 4, 16),
        "block_tables": torch.tensor([[2, 0]] * 3),
        "query_starts": torch.arange(4),
        "context_lengths": torch.arange(3) + 4,
        "alibi_slopes": waves(4),
        "prefix_lengths": torch.arange(3),
        "sinks": waves(4),
    }
    arguments = fitting | other
    options = None, None, *(arguments.pop(name) for name in ("alibi_slopes", "prefix_lengths", "sinks"))
    query = arguments.pop("query")
    return [paged_attention(query, keys, values, *arguments.values(), 0.3, *options)]


def adapted(**other: Tensor) -> Sequence[Tensor]:
    """Call lora_add on three rows of four inputs and six outputs, with one argument replaced."""
    fitting = {
        "y": waves(3, 6),
        "x": waves(3, 4),
        "slots": torch.tensor([1, 0, -1]),
        "a": waves(2, 5, 4),
        "b": waves(2, 5, 6),
        "ranks": torch.tensor([5, 2]),
        "scales": waves(2),
    }
    y, x, slots, *table = (fitting | other).values()
    lora_add(y, x, AdapterTable(*table), slots)
    return [y]


MISFITS: dict[str, Callable[[], Sequence[Tensor]]] = {
    "finite numbers of three axes": lambda: [all_finite(waves(2, 3, 4))],
    "the most likely of three axes": lambda: [most_likely(waves(2, 3, 4))],
    "adapted: fewer rows than slots": lambda: adapted(y=waves(2, 6), x=waves(2, 4)),
    "adapted: fewer rows of inputs": lambda: adapted(x=waves(1, 4)),
    "adapted: fewer outputs": lambda: adapted(y=waves(3, 1)),
    "adapted: fewer inputs": lambda: adapted(x=waves(3, 1)),
    "adapted: factors of fewer ranks": lambda: adapted(b=waves(2, 1, 6)),
    "adapted: factors of fewer slots": lambda: adapted(b=waves(1, 5, 6)),
    "adapted: fewer scales": lambda: adapted(scales=waves(1)),
    "adapted: int32 ranks": lambda: adapted(ranks=torch.tensor([5, 2]).to(INT32)),
    "adapted: factors that lie apart": lambda: adapted(a=waves(2, 4, 5).transpose(1, 2)),
    "a weight for each head, and rows for one": lambda: [linear(waves(4, 2, 8), waves(2, 4, 8))],
    "query heads that no key head has": lambda: attended(query=waves(3, 3, 16), alibi_slopes=waves(3), sinks=waves(3)),
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
    "gated norm of one row of gates": lambda: [gated_rms_norm(waves(FAR, 4), waves(1, 4), waves(4), 2, 1e-5)],
    "gated norm of groups that do not fit": lambda: [gated_rms_norm(waves(2, 4), waves(2, 4), waves(4), 3, 1e-5)],
    "sigmoid gate of fewer rows": lambda: [sigmoid_gate(waves(FAR, 4), waves(1, 4))],
    "sigmoid gate of another dtype": lambda: [sigmoid_gate(waves(FAR, 4), waves(FAR, 4).to(HALF))],
    "rope of fewer angles": lambda: [rope(waves(FAR, 2, 8), waves(1, 4), waves(1, 4))],
    "rope of more angles than channels": lambda: [rope(waves(5, 2, 8), waves(5, 40), waves(5, 40))],
    "rope of fewer sines": lambda: [rope(waves(FAR, 2, 8), waves(FAR, 4), waves(1, 1))],
    "rope of sines of another dtype": lambda: [rope(waves(FAR, 2, 8), waves(FAR, 4), waves(FAR, 4).to(HALF))],
    "angles of int32 positions": lambda: rope_angles(torch.arange(9).to(INT32), waves(4), 1.0, torch.float32),
    "angles of float64 frequencies": lambda: rope_angles(torch.arange(9), waves(4).to(DOUBLE), 1.0, torch.float32),
    "angles of positions in rows": lambda: rope_angles(torch.arange(8).view(2, 4), waves(4), 1.0, torch.float32),
    "more choices than rows": lambda: group_rows(waves(1, 4), torch.zeros(FAR, 2, dtype=torch.int64), 4),
    "grouped rows of three axes": lambda: group_rows(waves(2, 3, 4), torch.zeros(2, 1, dtype=torch.int64), 4),
    "combined rows of three axes": lambda: [combine_rows(waves(4, 2, 3), waves(2, 2), torch.arange(4).view(2, 2))],
    "int32 places": lambda: [combine_rows(waves(4, 4), waves(2, 2), torch.arange(4).view(2, 2).to(INT32))],
    "fewer weights than places": lambda: [combine_rows(waves(4, 4), waves(1, 1), torch.arange(4).view(2, 2))],
    "stored: fewer channels than the cache has": lambda: stored(
        waves(3, 2, 8), waves(3, 2, 16), torch.arange(3), channels=8
    ),
    "stored: int32 slots": lambda: stored(waves(3, 2, 16), waves(3, 2, 16), torch.arange(3).to(INT32)),
    "stored: more slots than rows": lambda: stored(waves(2, 2, 16), waves(2, 2, 16), torch.arange(3)),
    "stored: values of another dtype": lambda: stored(waves(3, 2, 16), waves(3, 2, 16).to(HALF), torch.arange(3)),
    "stored: fewer heads": lambda: stored(waves(3, 1, 16), waves(3, 1, 16), torch.arange(3)),
    "stored: more channels": lambda: stored(waves(3, 2, 32), waves(3, 2, 32), torch.arange(3)),
    "turned and stored: fewer angles": lambda: stored(waves(3, 2, 16), waves(3, 2, 16), torch.arange(3), waves(1, 8)),
    "turned and stored: one weight of a norm": lambda: stored(
        waves(3, 2, 16), waves(3, 2, 16), torch.arange(3), waves(3, 8), waves(1)
    ),
    "attended: values of fewer blocks": lambda: attended(replace(caches(16)[1], tensors=(waves(1, 4, 2, 16),))),
    "attended: values of another dtype": lambda: attended(replace(caches(16)[1], dtype=HALF)),
    "attended: other channels": lambda: attended(query=waves(3, 4, 8)),
    "attended: int32 lengths": lambda: attended(context_lengths=(torch.arange(3) + 4).to(INT32)),
    "attended: int32 tables": lambda: attended(block_tables=torch.tensor([[2, 0]] * 3).to(INT32)),
    "attended: fewer tables": lambda: attended(block_tables=torch.tensor([[2, 0]])),
    "attended: fewer slopes": lambda: attended(alibi_slopes=waves(2)),
    "attended: slopes of another dtype": lambda: attended(alibi_slopes=waves(4).to(DOUBLE)),
    "attended: fewer sinks": lambda: attended(sinks=waves(2)),
    "attended: sinks of another dtype": lambda: attended(sinks=waves(4).to(HALF)),
    "attended: fewer prefixes": lambda: attended(prefix_lengths=torch.arange(1)),
}


def outcome(case: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor] | type[Exception]:
    try:
        return case()
    except Exception as error:
        return type(error)


@compiled
@each("misfit", MISFITS)
def test_unsupported_arguments_behave_as_in_torch(misfit: str) -> None:
    result = outcome(MISFITS[misfit])
    with computing("torch"):
        expected = outcome(MISFITS[misfit])
    if isinstance(expected, type):
        assert result is expected
    else:
        torch.testing.assert_close(list(result), list(expected), rtol=0, atol=0)  # the same operators computed it


@compiled
@each("starts", [torch.tensor([0, 2]).to(INT32), torch.tensor([0, 1, 2])])
def test_starts_that_do_not_fit_are_refused(starts: Tensor) -> None:
    coded = products.pack_codes(torch.ones(20, 8, dtype=torch.int8), torch.ones(20, 1), None, 8)
    assert isinstance(coded, products.IntWeight)
    with pytest.raises(ValueError, match=r"starts \[\d\] of torch.int\d\d for 1 weights"):
        grouped_matmul(torch.ones(2, 8), WeightGroup([pack(torch.ones(20, 8))]), starts)
    with pytest.raises(ValueError, match=r"starts \[\d\] of torch.int\d\d for 1 weights"):
        products.grouped_matmul(torch.ones(2, 8), products.WeightGroup([coded]), starts)


@compiled
def test_a_weight_on_another_device_is_not_read() -> None:
    """Its address is not in this process's memory; torch defines the result."""
    assert linear(torch.ones(2, 8), torch.empty(4, 8, device="meta")).shape == (2, 4)


@compiled
def test_rows_on_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match="rows on meta and a weight on cpu"):
        matmul(torch.ones(2, 8, device="meta"), pack(torch.ones(20, 8)))


class Unused:
    """A library that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} reads an address on another device")


OTHERS: dict[str, Callable[[Tensor], object]] = {  # of a tensor [8] on another device
    "weight of a norm": lambda other: rms_norm(waves(2, 8), other, 1e-5),
    "residual of a norm": lambda other: add_rms_norm(waves(2, 8), other.expand(2, 8), waves(8), 1e-5),
    "weight of a layer norm": lambda other: layer_norm(waves(2, 8), other, None, 1e-5),
    "bias of a layer norm": lambda other: layer_norm(waves(2, 8), None, other, 1e-5),
    "what a gate multiplies": lambda other: swiglu(waves(2, 8), other.expand(2, 8)),
}


@each("name", OTHERS)
def test_tensors_on_another_device_are_not_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(build, "library", lambda: Unused())
    with contextlib.suppress(RuntimeError):  # torch's message about two devices
        OTHERS[name](torch.empty(8, device="meta"))


@any_way
def test_scales_and_biases_of_other_dtypes_and_devices_are_refused() -> None:
    codes, scales = torch.ones(3, 8, dtype=torch.int8), torch.ones(3, 1)
    weight = products.pack_codes(torch.ones(20, 8, dtype=torch.int8), torch.ones(20, 1), None, 8)
    for other in (scales.double(), scales.half(), scales.to("meta")):
        with pytest.raises(ValueError, match=f"scales of {other.dtype} on {other.device}: they are float32, where"):
            matmul(QuantizedActivations(codes, other, torch.float32), weight)
    with pytest.raises(ValueError, match=r"a bias \[20\] of torch.float32"):
        matmul(torch.ones(3, 8), pack(torch.ones(20, 8)), torch.ones(20, device="meta"))

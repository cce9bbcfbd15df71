"""Captured computations compared with the same computations in eager mode."""

import gc
import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import build
from kernels.all_finite import all_finite
from kernels.capture import capture, repeated
from kernels.gated_delta import gated_delta
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gelu import gelu, gelu_tanh
from kernels.kv_format import FORMATS, allocate
from kernels.kv_store import kv_store, rope_and_store
from kernels.layer_norm import layer_norm, layer_norm_quantize
from kernels.linear import (
    WeightGroup,
    grouped_matmul,
    linear,
    linear_per_head,
    matmul,
    matmul_per_head,
    matmul_swiglu,
    matmul_together,
    pack,
    pack_codes,
    pack_float8,
)
from kernels.linear.packed import take_rows
from kernels.lora import AdapterTable, lora_add
from kernels.moe import combine_rows, group_rows, route, route_corrected
from kernels.paged_attention import paged_attention
from kernels.quantize_rows import QuantizedActivations, quantize_rows
from kernels.rms_norm import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from kernels.rope import rope, rope_angles
from kernels.sampling import most_likely
from kernels.short_conv import short_conv
from kernels.sigmoid_gate import sigmoid_gate
from kernels.soft_cap import soft_cap
from kernels.ssd import ssd
from kernels.swiglu import swiglu, swiglu_quantize
from kernels.take_channels import take_channels
from kernels.threads import set_threads
from tests.helpers.cases import each
from tests.helpers.ways import compiled, computing

GENERATOR = torch.Generator().manual_seed(0)
FACTORS = torch.randn(2, 3, 64, generator=GENERATOR)
ADAPTERS, ADAPTER_SLOTS = (
    AdapterTable(FACTORS, FACTORS, torch.tensor([3, 2]), torch.ones(2)),
    torch.tensor([1, -1, 0, 1]),
)
TABLE, NORM = torch.randn(50, 64, generator=GENERATOR), torch.randn(64, generator=GENERATOR)
UP, DOWN = (pack(torch.randn(*shape, generator=GENERATOR)) for shape in ((2 * 176, 64), (64, 176)))
WIDE, WIDE_BIAS = pack(torch.randn(64, 2 * 176, generator=GENERATOR)), torch.randn(64, generator=GENERATOR)
CODES = pack_codes(
    torch.randint(-127, 128, (64, 64), generator=GENERATOR, dtype=torch.int8), torch.rand(64, 1), None, 8
)
FLOATS8 = pack_float8(torch.randn(64, 64, generator=GENERATOR).to(torch.float8_e4m3fn), torch.rand(64, 4))
SCALE = torch.tensor(0.1)
ORDER = torch.randperm(64, generator=GENERATOR)
HEADS = WeightGroup([pack(TABLE[head : head + 8, :16]) for head in range(4)])
FIRST = torch.zeros(2, dtype=torch.int64)


def layer(ids: Tensor, rows: Tensor) -> Tensor:
    """Compute with calls of the library, torch's operators between them, and views."""
    x = embedding(ids, TABLE)
    gate, up = matmul(rms_norm(x, NORM, 1e-5), UP).chunk(2, dim=-1)
    x, total = add_rms_norm(matmul(swiglu(gate, up), DOWN), x, NORM, 1e-5)
    left, right = matmul_together(matmul_swiglu(x, UP, UP), [WIDE, WIDE], [None, WIDE_BIAS])
    third, fourth = matmul_together(matmul_swiglu(left, CODES, CODES), [CODES, CODES], [None, NORM])
    x = total + right + third + fourth
    first, second = matmul(x, CODES)[rows].unflatten(-1, (2, 32)).unbind(1)
    return (first.contiguous().double() + second.flatten(1)).float() * x.new_full((), 2)


@pytest.mark.long
@torch.inference_mode()
@compiled
@each("num_rows", [1, 3, 17])
def test_a_replay_computes_on_the_new_inputs(num_rows: int) -> None:
    set_threads(2)
    ids, rows = torch.arange(num_rows), torch.arange(num_rows)
    graph, result = capture(lambda: layer(ids, rows))
    assert graph is not None
    assert result.equal(layer(ids, rows))
    gc.collect()
    others = [torch.full((num_rows, 64 * n), torch.nan) for n in range(1, 9)]  # in memory that nothing refers to
    for start in (5, 30):
        ids.copy_(torch.arange(start, start + num_rows))
        rows.copy_(torch.arange(num_rows).flip(0))
        graph.replay()
        assert result.equal(layer(ids, rows))
    assert all(other.isnan().all() for other in others)


CACHES = [allocate(format, (3, 4, 1), 16, torch.float32, torch.device("cpu")) for format in FORMATS["int8"]]
HERE, ONE_EACH, LENGTHS = torch.tensor([[0], [2]]), torch.tensor([0, 1, 2]), torch.tensor([1, 1])
PLACES, STATES, MATRIX_STATES = torch.tensor([0, 1, 8, 9]), torch.ones(3, 2, 16), torch.ones(3, 2, 1, 8, 32)
SEQUENCES = torch.tensor([0, 1, 4]), *torch.tensor([[0, 2], [-1, 1], [1, 3]])  # query_starts, reads, writes, ends
MATRIX_STEPS = *SEQUENCES, torch.tensor([5, 9])
CHOSEN, MATRICES, CODED = torch.tensor([[0], [1], [2], [0]]), WeightGroup([UP, UP, UP]), WeightGroup([CODES] * 3)


def codes(x: Tensor) -> QuantizedActivations:
    return QuantizedActivations(*quantize_rows(x), x.dtype)


def attended(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (4, 16))
    kv_store(heads[:2, :1], heads[2:, :1], *CACHES, HERE[:, 0] * 4)
    return paged_attention(heads[:2], *CACHES, HERE, ONE_EACH, LENGTHS, 0.25, sinks=NORM[:4])


def turned(x: Tensor) -> Tensor:
    heads, angles = x.view(4, 4, 16), TABLE[:4, :8]
    return rope_and_store(heads, heads[:, :1], heads[:, :1], angles, angles, *CACHES, PLACES)


def adapted(x: Tensor) -> Tensor:
    """Return x * 2 with rows' adapters, which change the tensor that they are added to."""
    y = x * 2
    lora_add(y, x, ADAPTERS, ADAPTER_SLOTS)
    return y


OPERATORS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...] | list[Tensor]]] = {  # of x [4, 64]
    "rope": lambda x: rope(x[:, None], TABLE[:4, :32], TABLE[4:8, :32]),
    "rope_angles": lambda x: rope_angles(x[:, 0].long(), NORM, 1.5, x.dtype),
    "kv_store, paged_attention": attended,
    "rope_and_store": turned,
    "rms_norm": lambda x: rms_norm(x, NORM, 1e-5),
    "gated_rms_norm": lambda x: gated_rms_norm(*x.chunk(2, dim=-1), NORM[:32], 16, 1e-5),
    "gated_rms_norm of outputs": lambda x: gated_rms_norm(*x.chunk(2, dim=-1), NORM[:32], 16, 1e-5, True),
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu_tanh(*x.chunk(2, dim=-1)),
    "layer_norm": lambda x: layer_norm(x, NORM, None, 1e-5),
    "layer_norm_quantize": lambda x: layer_norm_quantize(x, NORM, NORM, 1e-5, torch.int8, None),
    "swiglu": lambda x: swiglu(*x.chunk(2, dim=-1)),
    "sigmoid_gate": lambda x: sigmoid_gate(*x.chunk(2, dim=-1)),
    "matmul": lambda x: matmul(x, UP),
    "matmul_swiglu": lambda x: matmul_swiglu(x, UP, UP),
    "lora_add": adapted,
    "most_likely": most_likely,
    "quantize_rows": quantize_rows,
    "rms_norm_quantize": lambda x: rms_norm_quantize(x, NORM, 1e-5, torch.int8, None),
    "add_rms_norm_quantize": lambda x: add_rms_norm_quantize(x, TABLE[:4], NORM, 1e-5, torch.int8, None),
    "swiglu_quantize": lambda x: swiglu_quantize(*x.chunk(2, dim=-1), torch.int8, None),
    "static codes of a norm": lambda x: add_rms_norm_quantize(x, TABLE[:4], NORM, 1e-5, torch.int8, None, SCALE),
    "float8 codes": lambda x: quantize_rows(x, torch.float8_e4m3fn, 16),
    "float8 weight": lambda x: matmul(x, FLOATS8),
    "products of float8 codes": lambda x: matmul(
        QuantizedActivations(*quantize_rows(x, torch.float8_e4m3fn, 32), x.dtype, 32), FLOATS8
    ),
    "products of codes": lambda x: matmul_together(codes(x), [CODES], [NORM]),
    "gated product of codes": lambda x: matmul_swiglu(codes(x), CODES, CODES),
    "route": lambda x: route(x, 3, True),
    "soft_cap": lambda x: soft_cap(x, 2.5),
    "take_channels": lambda x: take_channels(x, ORDER),
    "take_rows": lambda x: take_rows(UP, x[:, 0].long(), x.dtype),
    "take_rows of ints": lambda x: take_rows(CODES, x[:, 0].long(), x.dtype),
    "route_corrected": lambda x: route_corrected(x, NORM, 3, True, False, 4, 2),
    "group_rows": lambda x: group_rows(x, CHOSEN, 3),
    "combine_rows": lambda x: combine_rows(x, x[:, :1] + 1, group_rows(x, CHOSEN, 3)[2]),
    "linear": lambda x: linear(x, TABLE * x[0, 0], TABLE[:, 0] + 1),
    "linear_per_head": lambda x: linear_per_head(x.unflatten(1, (4, 16)), TABLE[:32].view(4, 32, 16)),
    "matmul_per_head": lambda x: matmul_per_head(x.unflatten(1, (4, 16)), HEADS),
    "grouped_matmul": lambda x: grouped_matmul(x, MATRICES, group_rows(x, CHOSEN, 3)[1]),
    "grouped_matmul with biases": lambda x: grouped_matmul(
        x, MATRICES, group_rows(x, CHOSEN, 3)[1], None, TABLE.view(-1)[: 3 * UP.num_outputs].view(3, -1)
    ),
    "grouped_matmul of ints": lambda x: grouped_matmul(x, CODED, group_rows(x, CHOSEN, 3)[1]),
    "grouped_matmul of codes": lambda x: grouped_matmul(codes(x), CODED, group_rows(x, CHOSEN, 3)[1]),
    "all_finite": lambda x: all_finite(x / x[0, 0]),
    "short_conv": lambda x: short_conv(x[:, :48], TABLE[:3, :16], None, STATES, *SEQUENCES),
    "gated_delta": lambda x: gated_delta(
        x, x[:, :2], x[:, 2:4], NORM[:2], NORM[2:4], MATRIX_STATES, 2, 24, *MATRIX_STEPS
    ),
    "gated_delta of rows": lambda x: gated_delta(
        x, x[:, :16], x[:, 2:4], NORM[:2], NORM[:16], MATRIX_STATES, 2, 24, *MATRIX_STEPS
    ),
    "ssd": lambda x: ssd(x, x[:, :2], *NORM[:6].view(3, 2), MATRIX_STATES, 2, 24, 0.1, 9.0, *MATRIX_STEPS),
}


@torch.inference_mode()
@compiled
@each("name", OPERATORS)
def test_every_operator_is_replayed(name: str) -> None:
    set_threads(2)
    x, others = 9 * torch.randn(4, 64, generator=GENERATOR), 9 * torch.randn(4, 64, generator=GENERATOR)
    others[0, 0] = 0
    graph, result = capture(lambda: OPERATORS[name](x))
    assert graph is not None
    before = [part.clone() for part in _parts(result)]
    x.copy_(others)
    graph.replay()
    replayed = [part.clone() for part in _parts(result)]
    for part, old, expected in zip(replayed, before, _parts(OPERATORS[name](x)), strict=True):
        torch.testing.assert_close(
            part, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"a replay does not compute again: {m}"
        )
        # where all rows are written, and a static scale
        stays = part.dtype == torch.int64 or bool((part == SCALE).all())
        assert not torch.equal(part, old) or stays


GOVERNING = {
    "begin_recording",
    "end_recording",
    "replay",
    "free_recording",
    "run_chunks",
    "set_threads",
    "get_threads",
    "read_cores",
}
GOVERNING |= {"shared_bytes", "shared_slot_bytes", "shared_abort", "shared_aborted"}
BETWEEN_RANKS = {"shared_gather", "shared_owned_rows"}  # test_shared_memory.py replays it in several processes
OF_TORCH = {"torch_add", "torch_convert", "torch_copy", "torch_scale"}  # these repeat torch's operators, below
OUTSIDE_OF_STEPS = {"draw", "mask_logits", "count_upper_bytes", "compress", "decompress"}
OUTSIDE_OF_STEPS |= {"accumulate_product", "round_channels", "fit_scales"}  # of calibration and loading
OUTSIDE_OF_STEPS |= {"check_factors", "pack_blocks"}  # of loading


def test_all_but_what_governs_is_recorded() -> None:
    exported = [name for file in build.sources() for name in re.findall(r"^EXPORT\((\w+)\)", file.read_text(), re.M)]
    forgotten = sorted({*exported} - GOVERNING)
    assert not forgotten, f"no recording has calls of {forgotten}: declare them by OPERATOR, not by EXPORT"


@compiled
def test_operators_are_all_that_are_declared_and_take_what_they_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that is missing above is not proved to be replayable. An excess argument is one that C++ would not
    read."""
    functions, num_arguments = vars(build.library()), dict[str, int]()

    def watched(name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            num_arguments[name] = len(arguments)
            return functions[name](*arguments) if num_arguments[name] == len(functions[name].argtypes) else None

        return call

    with monkeypatch.context() as patch:
        patch.setattr(build, "library", lambda: SimpleNamespace(**{name: watched(name) for name in functions}))
        for compute in OPERATORS.values():
            compute(torch.randn(4, 64, generator=GENERATOR))
    others = GOVERNING | OUTSIDE_OF_STEPS | BETWEEN_RANKS | OF_TORCH
    declared = {name: len(functions[name].argtypes) for name in functions.keys() - others}
    assert num_arguments == declared, "arguments that Python gives beside those that C++ declares"


def _parts(result: Tensor | tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


class NoOperators(TorchDispatchMode):
    """Refuses every operator of torch."""

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError(f"{func} is called by Python")


IN_LIBRARY: dict[str, Callable[[Tensor], Tensor]] = {  # of x [6, 2 * 35 or more]
    "sum": lambda x: x[:3] + x[3:],
    "sum of rows without gaps": lambda x: x[0] + x[1],
    "times a number": lambda x: x * 0.22,
    "to float32 or back": lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32),
    "to another of 16 bits": lambda x: x.to(torch.bfloat16 if x.dtype == torch.float16 else torch.float16),
    "heads in another order": lambda x: x.unflatten(1, (2, -1)).transpose(0, 1).contiguous(),
    "every other row": lambda x: x[::2].clone(),
    "one row for all": lambda x: x[:1].expand(6, -1).contiguous(),
    "joined channels": lambda x: torch.cat((x[:, 3:9], x[:, :0], x[:, 1:2], x[:, 5:]), dim=-1),
    "joined rows": lambda x: torch.cat((x[4:], x[:3])),
    "joined heads": lambda x: torch.cat([part.unflatten(1, (2, -1)) for part in (x, x[:, :8])], dim=2),
}


@torch.inference_mode()
@compiled
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("name", IN_LIBRARY)
def test_simple_operators_of_torch_are_repeated_by_the_library(name: str, dtype: torch.dtype) -> None:
    set_threads(3)
    for channels in (70, 20_002):
        size = 2.0 ** torch.randint(-140, 100, (6, channels), generator=GENERATOR)
        x, others = ((torch.randn(6, channels, generator=GENERATOR) * size).to(dtype) for _ in range(2))
        for numbers in (x, others):
            numbers[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        graph, result = capture(lambda x=x: IN_LIBRARY[name](x))
        assert graph is not None
        x.copy_(others)
        result.fill_(7)
        with NoOperators():
            graph.replay()
        torch.testing.assert_close(result, IN_LIBRARY[name](x), rtol=0, atol=0, equal_nan=True)


IN_PYTHON: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum of rows that lie apart": lambda x: x[::2] + x[1::2],
    "a row for all": lambda x: x + x[0],
    "a sum of dtypes": lambda x: x + x.double(),
    "a number": lambda x: x + 3,
    "a part of the other": lambda x: torch.add(x, x, alpha=0.5),
    "columns": lambda x: x.T.contiguous(),
    "integers": lambda x: x.long() * 3,
    "a product of two": lambda x: x * x,
}


@torch.inference_mode()
@compiled
@each("name", IN_PYTHON)
def test_other_arguments_are_repeated_by_torch(name: str) -> None:
    set_threads(2)
    x, others = 9 * torch.randn(6, 70, generator=GENERATOR), 9 * torch.randn(6, 70, generator=GENERATOR)
    graph, result = capture(lambda: IN_PYTHON[name](x))
    assert graph is not None
    x.copy_(others)
    graph.replay()
    assert result.equal(IN_PYTHON[name](others))


@torch.inference_mode()
@compiled
def test_calls_outside_the_capture_are_not_recorded() -> None:
    set_threads(1)
    ids = torch.tensor([1, 2])
    graph, result = capture(lambda: layer(ids, FIRST))
    assert graph is not None
    expected = result.clone()
    layer(torch.tensor([3, 4]), FIRST)  # after the end
    graph.replay()
    assert result.equal(expected)
    with pytest.raises(RuntimeError, match="must match the size"):
        capture(lambda: rms_norm(TABLE, NORM, 1e-5) + torch.ones(3, 3))
    layer(ids, FIRST)  # after an error
    graph.replay()
    assert result.equal(expected)


@torch.inference_mode()
@compiled
@each(
    "compute",
    [
        lambda x: x.sort().values,  # not known to be repeatable
        lambda x: x[x > 0],  # a shape that depends on values
        lambda x: torch.ops.aten.index(x, [(x[:, 0] > 0).to(torch.uint8)]),
        lambda x: x + x.amax().item(),  # a value that would be frozen
        lambda x: x + x.amax().tolist(),
        lambda x: x + float(x.numpy()[0, 0]),
        lambda x: x + float(np.asarray(x)[0, 0]),
        lambda x: x + float(rms_norm(x, NORM, 1e-5)[0, 0]),
    ],
)
def test_a_call_that_reads_values_is_computed_and_not_captured(compute: Callable[[Tensor], Tensor]) -> None:
    set_threads(1)
    graph, result = capture(lambda: compute(TABLE))
    assert graph is None
    assert result.equal(compute(TABLE))


@compiled
def test_a_call_of_python_is_repeated_as_a_whole() -> None:
    set_threads(1)
    source, out, times = torch.ones(3), torch.empty(3), []

    def call() -> None:
        out.copy_(
            source + 1 if source.tolist()[0] < 5 else source
        )  # a selection by values, which capture itself rejects
        times.append(1)

    def compute() -> Tensor:
        repeated(call)
        return out * 2

    graph, result = capture(compute)
    assert graph is not None
    assert (result.tolist(), len(times)) == ([4.0] * 3, 1)
    for value, wanted in ((2.0, 6.0), (7.0, 14.0)):
        source.fill_(value)
        graph.replay()
        assert result.tolist() == [wanted] * 3
    assert len(times) == 3
    repeated(call)
    assert out.tolist() == [7.0] * 3  # when nothing is recorded, it is a plain call


def test_without_the_library_nothing_is_captured() -> None:
    with computing("torch"):
        graph, result = capture(lambda: TABLE + 1)
    assert graph is None
    assert result.equal(TABLE + 1)

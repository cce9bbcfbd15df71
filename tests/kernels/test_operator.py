"""The operators as nodes of torch's graphs: their declarations are true, and a graph has the bits of eager mode."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels.accumulate_product  # noqa: F401 - these operators are asked for by name
import kernels.fit_scales  # noqa: F401
import kernels.gated_delta  # noqa: F401
import kernels.gated_rms_norm  # noqa: F401
import kernels.gelu  # noqa: F401
import kernels.round_channels  # noqa: F401
import kernels.short_conv  # noqa: F401
import kernels.sigmoid_gate  # noqa: F401
import kernels.soft_cap  # noqa: F401
import kernels.ssd  # noqa: F401
import kernels.take_channels  # noqa: F401
from kernels import build
from kernels import linear as products
from kernels.all_finite import all_finite
from kernels.kv_format import PARTS, Int4, PagedVectors, allocate
from kernels.kv_store import kv_store
from kernels.linear.packed import GROUP, WEIGHT
from kernels.lora import AdapterTable
from kernels.moe import group_rows
from kernels.paged_attention import paged_attention
from kernels.quantize_rows import QuantizedActivations, quantize_rows
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope, rope_angles
from kernels.swiglu import swiglu
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.cases import each
from tests.helpers.integer_weights import make
from tests.helpers.ways import any_way, by_ways, every_way

GENERATOR = torch.Generator().manual_seed(0)
ops = torch.ops.quintet


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


# What an operator says of itself is the same for all instruction sets.
best_and_torch = by_ways(lambda: [every_way()[0], "torch"])
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.matrix)]
Check = Callable[..., None]


@pytest.fixture(
    params=[
        ("test_schema", "test_autograd_registration", "test_faketensor"),
        pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.long),  # 0.1 s for a call
    ],
    ids=["sizes", "symbols"],
)
def opcheck(request: pytest.FixtureRequest) -> Check:
    """The schema, fake tensors' shapes, strides and dtypes, and that nothing else is written to; or shapes whose sizes are symbols.

    Symbols are checked with the C++ kernels alone: torch's operators give the same shapes.
    """

    def check(op: Any, *args: Any, **kwargs: Any) -> None:
        if len(request.param) > 1 or build.library():
            torch.library.opcheck(op.default, args, kwargs, test_utils=request.param)

    return check


@pytest.mark.parametrize("dtype", DTYPES)
@best_and_torch
def test_rows(opcheck: Check, dtype: torch.dtype) -> None:
    num_rows = 1 if dtype == torch.float32 else 13
    x, weight, wide = randn(num_rows, 33, dtype=dtype), randn(33, dtype=dtype), randn(num_rows, 66, dtype=dtype)
    columns = randn(33, num_rows, dtype=dtype).T
    for rows in (x, columns):
        opcheck(ops.rms_norm, rows, weight, 1e-5)
        opcheck(ops.rms_norm, rows, weight, 1e-5, 1.0)
        opcheck(ops.layer_norm, rows, weight, None, 1e-5)
        opcheck(ops.layer_norm_quantize, rows, weight, weight, 1e-5, torch.int8, None)
        opcheck(ops.gelu, rows)
        opcheck(ops.gelu_tanh, rows, x)
        opcheck(ops.soft_cap, rows, 2.0)
        opcheck(ops.take_channels, rows, torch.randperm(33))
        opcheck(ops.add_rms_norm, rows, x, weight, 1e-5)
        opcheck(ops.gated_rms_norm, rows, wide[:, 33:], weight, 11, 1e-5)
        opcheck(ops.gated_rms_norm, rows, wide[:, 33:], weight, 11, 1e-5, True)
        opcheck(ops.sigmoid_gate, rows, wide[:, 33:])
        opcheck(ops.sigmoid_gate, rows, wide[:, 33:34])
        opcheck(ops.quantize_rows, rows)
        opcheck(ops.quantize_rows, rows, torch.int8, 16, torch.ones(1))
        opcheck(ops.rms_norm_quantize, rows, weight, 1e-5, torch.int8, None)
        opcheck(ops.add_rms_norm_quantize, rows, x, weight, 1e-5, torch.int8, None)
        opcheck(ops.add_rms_norm_quantize, rows, x, weight, 1e-5, torch.int8, None, torch.ones(1))
        opcheck(ops.all_finite, rows)
        opcheck(ops.fit_scales, rows, 11, num_rows > 1, torch.float16)
    states, starts = torch.zeros(2, 2, 22, dtype=dtype), torch.tensor([0, num_rows])
    opcheck(
        ops.short_conv, wide, randn(3, 22, dtype=dtype), None, states, starts, *torch.tensor([[-1], [1], [num_rows]])
    )
    gates, states, slots = (randn(num_rows, 2, dtype=dtype), wide[:, :2]), torch.zeros(2, 2, 1, 8, 32), starts[:1]
    steps = (starts, slots - 1, slots + 1, starts[1:], starts[1:])
    opcheck(ops.gated_delta, wide, *gates, *randn(2, 2), states, 2, 25, *steps)
    opcheck(ops.gated_delta, wide, wide[:, :16], gates[1], randn(2), randn(16), states, 2, 25, *steps)
    opcheck(ops.ssd, wide, gates[0], *randn(3, 2), states, 2, 25, 0.1, torch.inf, *steps)
    opcheck(ops.accumulate_product, torch.zeros(33, 66), x, wide, False, False)
    opcheck(ops.swiglu, *wide.chunk(2, dim=-1))
    opcheck(ops.swiglu_quantize, *wide.chunk(2, dim=-1), torch.int8, None)
    table = AdapterTable(randn(2, 3, 33, dtype=dtype), randn(2, 3, 66, dtype=dtype), torch.tensor([3, 1]), randn(2))
    opcheck(ops.lora_add, wide, x, *vars(table).values(), torch.arange(num_rows) % 3 - 1)
    heads, angles = randn(num_rows, 9, 34, dtype=dtype)[:, 2:5], randn(2, num_rows, 16, dtype=dtype)
    opcheck(ops.rope, heads, *angles)
    opcheck(ops.rope, heads, *angles, interleaved=True)
    opcheck(ops.rope_angles, torch.arange(num_rows), torch.rand(17), 1.25, dtype)
    block, scales, codes = randn(7, 9), torch.rand(5, 9) + 0.1, torch.zeros(5, 9, dtype=torch.int8)
    opcheck(
        ops.round_channels, block, torch.eye(7), scales, codes.clone(), scales > 0.5, codes, scales.clone(), -8.0, 7.0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@best_and_torch
def test_products(opcheck: Check, dtype: torch.dtype) -> None:
    x, sizes, bias = randn(5, 31, dtype=dtype), (17, 16), randn(17, dtype=dtype)
    opcheck(ops.linear, x, randn(17, 31, dtype=dtype), bias)
    opcheck(ops.linear_per_head, randn(5, 3, 31, dtype=dtype), randn(3, 17, 31, dtype=dtype))
    heads = products.WeightGroup([products.pack(randn(17, 31, dtype=dtype)) for _ in range(3)])
    opcheck(ops.matmul_per_head, randn(5, 3, 31, dtype=dtype), *GROUP.take(heads))
    formats: list[list[products.PackedWeight]] = [[products.pack(randn(size, 31, dtype=dtype)) for size in sizes]]
    for bits, group, zeros in ((8, 0, False), (4, 32, True)):
        formats.append([products.pack_codes(*make(size, 31, bits, group, zeros)[:3], bits) for size in sizes])
    for number, weights in enumerate(formats):
        parts = [WEIGHT.take(weight) for weight in weights]
        for rows in ((x, None, dtype, None), (*quantize_rows(x), dtype, None))[: 1 + (number > 0)]:
            opcheck(ops.matmul_together, *rows, *map(list, zip(*parts, strict=True)), [bias, None])
            opcheck(ops.matmul_swiglu, *rows, *parts[0], *parts[0], None, bias)
            group_of = GROUP.take(products.WeightGroup(weights[:1] * 2))
            for ups in (GROUP.take(None), group_of):
                opcheck(ops.grouped_matmul, *rows, *group_of, torch.tensor([0, 2, 5]), *ups)
            biases = randn(2, sizes[0], dtype=dtype)
            opcheck(ops.grouped_matmul, *rows, *group_of, torch.tensor([0, 2, 5]), *GROUP.take(None), biases)


@best_and_torch
@each("dtype", [torch.float32, torch.bfloat16])
def test_choices(opcheck: Check, dtype: torch.dtype) -> None:
    x, logits, chosen = (
        randn(4, 6, dtype=dtype),
        randn(4, 9, dtype=dtype),
        torch.tensor([[0, 2], [1, 2], [2, 0], [2, 1]]),
    )
    opcheck(ops.route, logits, 2, True)
    opcheck(ops.route_corrected, randn(5, 12), randn(12), 3, True)
    opcheck(ops.group_rows, x, chosen, 3)
    opcheck(ops.combine_rows, randn(8, 6, dtype=dtype), randn(4, 2).abs(), group_rows(x, chosen, 3)[2])
    opcheck(ops.most_likely, logits)
    opcheck(ops.mask_logits, logits, torch.tensor([[5], [-1], [0], [1 << 8]], dtype=torch.int32))
    opcheck(ops.draw, logits.float(), torch.tensor([[1, 0, 1, 0, 0.5]], dtype=torch.float64).expand(4, 5))


def caches_of(name: str) -> list[PagedVectors]:
    """Return keys and values, N=3, B=4, G=2, D=12."""
    caches = [allocate(format, (3, 4, 2), 12, torch.float32, torch.device("cpu")) for format in formats_of(name, 2)]
    for part in caches[0].tensors + caches[1].tensors:
        part.view(torch.uint8).zero_()
    return caches


SLOTS, TABLES = torch.tensor([8, 9, 10, 0, 1]), torch.tensor([[2], [0]])
STARTS, LENGTHS = torch.tensor([0, 3, 5]), torch.tensor([3, 2])


@best_and_torch
@each("name", [name for name in NAMES if "fp8" not in name])  # opcheck multiplies the tensors that it compares
def test_the_cache(opcheck: Check, name: str) -> None:
    keys, values = (PARTS.take(cache) for cache in caches_of(name))
    opcheck(ops.kv_store, randn(5, 2, 12), randn(5, 4, 12)[:, ::2], *keys, *values, SLOTS)
    new = randn(5, 6, 12), randn(5, 2, 12), randn(5, 4, 12)[:, ::2]
    opcheck(ops.rope_and_store, *new, *randn(2, 5, 6), *keys, *values, SLOTS)
    opcheck(ops.rope_and_store, *new, *randn(2, 5, 4), *keys, *values, SLOTS, True, randn(12), randn(12), 1e-5)
    opcheck(ops.paged_attention, randn(5, 6, 12), *keys, *values, TABLES, STARTS, LENGTHS, 0.3)
    options = 20.0, 2, torch.rand(6), None, torch.rand(6)
    opcheck(ops.paged_attention, randn(5, 6, 12), *keys, *values, TABLES, STARTS, LENGTHS, 0.3, *options)


class Attention(nn.Module):
    def __init__(self, caches: list[PagedVectors]) -> None:
        super().__init__()
        self.caches = caches

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor) -> Tensor:
        """`tensors`: of the caches."""
        keys, values = self.caches
        keys = replace(keys, tensors=tensors[: len(keys.tensors)])
        values = replace(values, tensors=tensors[len(keys.tensors) :])
        kv_store(key, value, keys, values, SLOTS)
        return paged_attention(query, keys, values, TABLES, STARTS, LENGTHS, 0.3, window=2)


@torch.inference_mode()
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
@any_way
@each("name", NAMES)
def test_exported_attention_stores_and_reads_the_same_bits(name: str, strict: bool) -> None:
    caches, vectors = caches_of(name), (randn(5, 6, 12), randn(5, 2, 12), randn(5, 2, 12))
    layer = Attention(caches)
    copies = [[part.clone() for part in caches[0].tensors + caches[1].tensors] for _ in range(3)]
    program = torch.export.export(layer, (*vectors, *copies[0]), strict=strict)
    assert program.module()(*vectors, *copies[1]).equal(layer(*vectors, *copies[2]))
    for untouched, mine, expected in zip(*copies, strict=True):
        assert not untouched.view(torch.uint8).any()  # tracing stores nothing
        assert expected.view(torch.uint8).any()
        assert mine.view(torch.uint8).equal(expected.view(torch.uint8))


@each("name", NAMES)
def test_a_cache_is_its_parts(name: str) -> None:
    for format in formats_of(name, 2):
        cache = allocate(format, (3, 4, 2), 12, torch.bfloat16, torch.device("cpu"))
        again = PARTS.make(*PARTS.take(cache))
        assert (again.tensors, again.channels, again.dtype) == (cache.tensors, 12, torch.bfloat16)
        assert type(again.format) is type(format)
        assert again.scales is cache.scales
        assert cache.has_static_scales or again.format == format


class Layer(nn.Module):
    """A feed-forward layer between a rotation and a norm. Its weights are packed, quantised or not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frequencies = randn(64), torch.rand(16)
        self.gate, self.up, self.down = (products.pack(randn(*shape) / 8) for shape in ((40, 64), (40, 64), (64, 40)))
        self.bias = randn(64)
        self.coded = [products.pack_codes(*make(64, 64, bits, 32, False)[:3], bits) for bits in (8, 4)]

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        cos, sin = rope_angles(positions, self.frequencies, 1.0, x.dtype)
        x = rope(rms_norm(x, self.norm, 1e-5).unflatten(-1, (2, 32)), cos, sin).flatten(1)
        left, right = products.matmul_together(x, [self.gate, self.up], [None, None])
        y = products.matmul(swiglu(left, right), self.down, self.bias)
        y = y + products.matmul(products.matmul_swiglu(x, self.gate, self.up), self.down)
        normed, total = add_rms_norm(y, x, self.norm, eps=1e-5)
        of_floats = products.matmul_swiglu(normed, *[self.coded[0]] * 2, gate_bias=self.bias)
        of_codes = products.matmul_together(
            QuantizedActivations(*quantize_rows(of_floats), x.dtype), [self.coded[1]], [self.bias]
        )
        return of_floats, *of_codes, total, all_finite(total)


NODES = [
    "rope_angles",
    "rms_norm",
    "rope",
    "matmul_together",
    "swiglu",
    "matmul_together",
    "matmul_swiglu",
    "matmul_together",
    "add_rms_norm",
    "matmul_swiglu",
    "quantize_rows",
    "matmul_together",
    "all_finite",
]


def equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(left, right, strict=True))


@pytest.mark.long
@torch.inference_mode()
@pytest.mark.parametrize("strict", [False, True])
@any_way
def test_an_exported_layer_computes_the_same_bits(strict: bool) -> None:
    layer, num_rows = Layer(), {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(
        layer, (randn(5, 64), torch.arange(5)), dynamic_shapes=(num_rows, num_rows), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("quintet")]
    assert targets == [f"quintet.{name}.default" for name in NODES]
    file = io.BytesIO()
    torch.export.save(program, file)
    read = torch.export.load(file)
    for size in (2, 5, 30):
        inputs = randn(size, 64), torch.arange(size)
        assert equal(program.module()(*inputs), layer(*inputs))
        assert equal(read.module()(*inputs), layer(*inputs))


@torch.inference_mode()
@any_way
def test_a_compiled_layer_computes_the_same_bits() -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)  # inductor would need its own compiler
    inputs = randn(5, 64), torch.arange(5)
    assert equal(compiled(*inputs), layer(*inputs))


def test_errors_match_the_function() -> None:
    weight = products.pack(randn(17, 31))
    with pytest.raises(ValueError, match=r"rows \[5, 30\] cannot be multiplied by a weight of 31 inputs"):
        ops.matmul_together(randn(5, 30), None, torch.float32, None, *([part] for part in WEIGHT.take(weight)), [None])
    numbers = [17], [32], [0], [0], [False], [None]
    with pytest.raises(
        ValueError, match=r"packed weights \[2, 32, 16, 1\] cannot be \[2, 31, 16, 1\] of torch.float32"
    ):
        ops.matmul_together(randn(5, 32), None, torch.float32, None, [weight.memory], *numbers)
    cache = allocate(Int4(2), (3, 4, 2), 12, torch.float32, torch.device("cpu"))
    inputs = randn(5, 6, 12), randn(5, 2, 12), randn(5, 2, 12), *cache.tensors, *cache.tensors
    with pytest.raises(ValueError, match=r"a graph cannot have a cache of Int4\(num_groups=2\), only of none, int8"):
        torch.export.export(Attention([cache, cache]), inputs)

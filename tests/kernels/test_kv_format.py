"""The formats of the cache: error bounds of every element in float64, hand-written bytes, and pools of NaN around the
stored vectors."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from kernels.copy_blocks import copy_blocks
from kernels.kv_format import FORMATS as BY_NAME
from kernels.kv_format import (
    Float8,
    Int4,
    Int8,
    KVFormat,
    PagedVectors,
    StaticFloat8,
    StaticInt8,
    Unquantised,
    allocate,
)
from kernels.kv_store import kv_store
from kernels.paged_attention import paged_attention
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.cases import each
from tests.helpers.written_attention import Options, written_out

FORMATS: dict[str, KVFormat] = {
    "int8": Int8(),
    "fp8": Float8(),
    "int4, four groups": Int4(4),
    "int4, one group": Int4(1),
    "none": Unquantised(),
}
QUANTISED = [name for name in FORMATS if name != "none"]
GROUP_SIZES = {  # of int4 by channels: with one group, and with four
    1: (4, 4), 2: (4, 4), 5: (6, 4), 8: (8, 4), 16: (16, 4), 17: (18, 6), 64: (64, 16), 80: (80, 20), 128: (128, 32), 576: (128, 32),
}  # fmt: skip
BLOCKS, BLOCK_SIZE, GROUPS = 7, 4, 3
NAN_BYTE = 0xFF  # NaN in float8, float16 and float32; -1 in int8


def vectors(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return tiny and huge vectors, some with an outlier channel, some zero."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(tokens, GROUPS, channels, generator=generator)
    x *= 10.0 ** torch.randint(-3, 4, (tokens, GROUPS, 1), generator=generator)
    x[::3, :, 0] *= 30
    x[1::7] = 0
    return x.to(dtype)


def poisoned(name: str, channels: int, dtype: torch.dtype = torch.float32) -> PagedVectors:
    pool = allocate(FORMATS[name], (BLOCKS, BLOCK_SIZE, GROUPS), channels, dtype, torch.device("cpu"))
    for tensor in pool.tensors:
        tensor.view(torch.uint8).fill_(NAN_BYTE)
    return pool


def bound(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the error bound of each element, [..., D]: half a step of its scale. float32 rounds scale, quotient and
    product: 1 + 2^-20."""
    largest = x.abs().amax(-1, keepdim=True)
    if name == "int8":
        half = (largest / 127 / 2).expand_as(x)
    elif name == "fp8":  # 3 bits after the point; below 2^-6 steps of 2^-9
        half = (x.abs() / 16).maximum(largest / 448 * 2**-10)
    # a group's range in 15 steps; float16 rounds the scale by 2^-11, below 2^-14 by 2^-25, and the minimum likewise
    else:
        parts = x.split(GROUP_SIZES[x.shape[-1]]["four" in name], dim=-1)
        lows, ranges = [p.amin(-1, True) for p in parts], [p.amax(-1, True) - p.amin(-1, True) for p in parts]
        steps = [r / 15 / 2 * (1 + 2**-11) + 15 * 2**-25 + r * 2**-11 + low.abs() * 2**-11 + 2**-25
                 for r, low in zip(ranges, lows, strict=True)]  # fmt: skip
        half = torch.cat([step.expand_as(p) for step, p in zip(steps, parts, strict=True)], dim=-1)
    return half * (1 + 2**-20)


@each("channels", GROUP_SIZES)
@each("name", QUANTISED)
def test_every_element_is_within_half_a_step(name: str, channels: int) -> None:
    x = vectors(29, channels)
    stored = FORMATS[name].encode(x)
    back = FORMATS[name].decode(stored)[..., :channels]
    assert ((back.double() - x.double()).abs() <= bound(name, x.double())).all()
    for i in (0, 1, 14):  # alone as in a batch, bit for bit
        for part, batch_part in zip(FORMATS[name].encode(x[i]), stored, strict=True):
            assert part.view(torch.uint8).equal(batch_part[i].view(torch.uint8))


@each("name", QUANTISED)
@each("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_encoded_as_the_same_numbers_in_float32(name: str, dtype: torch.dtype) -> None:
    x = vectors(9, 64, torch.float32).clamp(-6e4, 6e4).to(dtype)
    for half, single in zip(FORMATS[name].encode(x), FORMATS[name].encode(x.float()), strict=True):
        assert half.view(torch.uint8).equal(single.view(torch.uint8))


def test_int8_and_float8_written_out() -> None:
    x = torch.tensor([[-254.0, 3.0, 0.0, 100.0], [0.0, 0.0, 0.0, 0.0]])
    codes, scales = FORMATS["int8"].encode(x)
    assert codes.tolist() == [[-127, 2, 0, 50], [0] * 4]  # 1.5 rounds to the even 2
    assert scales[0] == 2.0
    codes, scales = FORMATS["fp8"].encode(x[:, :3])
    assert codes.float().tolist() == [[-448.0, 5.5, 0.0], [0.0] * 3]  # 3 / 0.567 = 5.29
    assert scales[0] == torch.tensor(254.0) / 448


def test_int4_written_out() -> None:
    # D=9: groups of 6, padded with the last channel
    x = torch.tensor([-1.0, 14.0, 2.0, 0.0, 10.0, 10.0, 11.0, 25.0, 7.0])
    packed, ranges = Int4(2).encode(x)
    assert ranges.tolist() == [[1.0, -1.0], [pytest.approx(18 / 15, rel=2**-11), 7.0]]
    assert packed.tolist() == [0xF0, 0x13, 0xBB, 0xF3, 0x00, 0x00]  # 0 15, 3 1, 11 11; 3.3 15, 0 0, 0 0
    back = Int4(2).decode((packed, ranges))
    assert back.shape == (12,)
    assert back[:6].tolist() == [-1.0, 14.0, 2.0, 0.0, 10.0, 10.0]


@each("bad", [math.nan, math.inf, -math.inf])
@each("name", QUANTISED)
def test_non_finite_values_stay_non_finite(name: str, bad: float) -> None:
    x = vectors(2, 16)
    x[0, 1, 3] = bad
    back = FORMATS[name].decode(FORMATS[name].encode(x))
    assert not back[0, 1].isfinite().all()
    assert back[1].isfinite().all()


STATIC = {"int8": (127, StaticInt8), "fp8": (448, StaticFloat8)}


@each("channels", [1, 8, 17, 64, 128])
@each("name", STATIC)
def test_static_scales_bound_every_element_and_saturate(name: str, channels: int) -> None:
    largest, kind = STATIC[name]
    x = vectors(29, channels)
    scales = torch.tensor([0.01, 1e-5, 3.0])  # of GROUPS heads; the second one is far too small for most vectors
    stored = kind(scales).encode(x)
    assert len(stored) == 1
    assert stored[0].shape == x.shape
    back, limit = kind(scales).decode(stored).double(), largest * scales.double()[:, None]
    wanted, step = x.double().clamp(-limit, limit), scales.double()[:, None]
    half = step / 2 if name == "int8" else (wanted.abs() / 16).maximum(step * 2**-10)
    assert ((back - wanted).abs() <= half * (1 + 2**-20)).all()
    assert (x.abs() > limit).any()
    assert (back[x.double() > limit] == limit.expand_as(x)[x.double() > limit].float()).all()


@each("bad", [math.nan, math.inf, -math.inf])
@each("name", STATIC)
def test_static_scales_hide_nothing_that_is_not_finite(name: str, bad: float) -> None:
    """Only the element itself changes: its neighbours keep the static scale."""
    x = torch.ones(2, GROUPS, 16)
    x[0, 1, 3] = bad
    kind = STATIC[name][1](torch.full((GROUPS,), 0.01))
    assert kind.decode(kind.encode(x)).isnan().nonzero().tolist() == [[0, 1, 3]]


def test_static_scales_written_out() -> None:
    x = torch.tensor([[-254.0, 3.0, 1000.0], [1.0, -0.3, 0.05]])  # two heads
    (codes,) = StaticInt8(torch.tensor([2.0, 0.1])).encode(x)
    assert codes.tolist() == [[-127, 2, 127], [10, -3, 0]]  # 1.5 rounds to the even 2, 0.5 to 0
    (codes,) = StaticFloat8(torch.tensor([0.5, 0.1])).encode(x)
    assert codes.float().tolist() == [[-448.0, 6.0, 448.0], [10.0, -3.0, 0.5]]


@each("name, expected", [("none", (256, 256)), ("int8", (132, 132)), ("fp8", (132, 132)), ("int4", (80, 68))])
def test_bytes_of_a_key_and_a_value_of_128_bfloat16_channels(name: str, expected: tuple[int, int]) -> None:
    for format, size in zip(BY_NAME[name], expected, strict=True):
        pool = allocate(format, (BLOCKS, BLOCK_SIZE, GROUPS), 128, torch.bfloat16, torch.device("meta"))
        assert sum(tensor.nbytes for tensor in pool.tensors) == BLOCKS * BLOCK_SIZE * GROUPS * size


@each("channels", [5, 64])
@each("name", FORMATS)
def test_store_and_copy_touch_nothing_else(name: str, channels: int) -> None:
    keys, values = poisoned(name, channels), poisoned(name, channels)
    before = [tensor.clone() for tensor in keys.tensors]
    key, value = vectors(3, channels), -vectors(3, channels)
    kv_store(key, value, keys, values, torch.tensor([19, 0, 7]))
    for pool, new in ((keys, key), (values, value)):
        for stored, part in zip(pool.tensors, pool.format.encode(new), strict=True):
            for (block, offset), one in zip(((4, 3), (0, 0), (1, 3)), part, strict=True):
                assert stored[block, offset].view(torch.uint8).equal(one.view(torch.uint8))
    copy_blocks(keys, values, torch.tensor([4, 1]), torch.tensor([2, 5]))
    for stored, old in zip(keys.tensors, before, strict=True):
        assert stored[[2, 5]].view(torch.uint8).equal(stored[[4, 1]].view(torch.uint8))
        assert stored[[3, 6]].view(torch.uint8).equal(old[[3, 6]].view(torch.uint8))
        untouched = [slot for slot in range(8) if slot not in (0, 7)]
        assert stored.flatten(0, 1)[untouched].view(torch.uint8).equal(old.flatten(0, 1)[untouched].view(torch.uint8))


OPTIONS: list[Options] = [
    {},
    {"soft_cap": 2.0, "window": 6, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0, 0.3, 0.1])},
    {"prefix_lengths": torch.tensor([9, 0, 3]), "sinks": torch.tensor([0.5, -3.0, 4.0, 1.0, 0.3, 9.0])},
]


@each("channels, value_channels", [(8, 8), (17, 5), (80, 80), (64, 40)])
@each("name", QUANTISED)
@each("options", OPTIONS)
def test_attention_reads_what_was_stored(name: str, channels: int, value_channels: int, options: Options) -> None:
    """The pool is full of NaN. Compared with attention in float64 over vectors that are encoded and decoded one by
    one."""
    keys, values = poisoned(name, channels), poisoned(name, value_channels)
    lengths, tables = [(4, 9), (1, 1), (7, 7)], [[5, 1, 3], [6, 0, 0], [0, 2, 0]]
    generator = torch.Generator().manual_seed(0)
    queries, expected = [], []
    for s, (new, total) in enumerate(lengths):
        key = torch.randn(total, GROUPS, channels, generator=generator)
        value = torch.randn(total, GROUPS, value_channels, generator=generator)
        slots = torch.tensor([tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(total)])
        kv_store(key, value, keys, values, slots)
        query = torch.randn(new, 2 * GROUPS, channels, generator=generator)
        kept = [
            torch.stack([FORMATS[name].decode(FORMATS[name].encode(row))[..., : row.shape[-1]] for row in rows])
            for rows in (key, value)
        ]
        queries.append(query)
        expected.append(written_out(query, kept[0], kept[1], channels**-0.5, s, options))
    starts = torch.tensor([0, *itertools.accumulate(new for new, _ in lengths)])
    context = torch.tensor([total for _, total in lengths])
    result = paged_attention(
        torch.cat(queries), keys, values, torch.tensor(tables), starts, context, channels**-0.5, **options
    )
    # float32 sums of at most 80 terms
    torch.testing.assert_close(result.double(), torch.cat(expected), rtol=0, atol=2e-6)


@each("name", NAMES)
def test_tensors_that_hold_other_vectors_are_not_for_the_kernels(name: str) -> None:
    cache = allocate(formats_of(name, GROUPS)[0], (BLOCKS, BLOCK_SIZE, GROUPS), 80, torch.float32, torch.device("cpu"))
    assert cache.view is not None
    assert replace(cache, channels=40).view is not None
    stored, *scales = cache.tensors
    others = [
        replace(cache, channels=161),
        replace(cache, tensors=(stored.view(-1), *scales)),
        replace(cache, tensors=(stored.double(), *scales)),
    ]
    if scales:
        others += [replace(cache, tensors=(stored, part)) for part in (scales[0][:1], scales[0].double())]
    if name == "int4":
        one = scales[0][:, :, :, :1]  # a group of 80 codes without its scale
        others += [replace(cache, tensors=(stored, part)) for part in (one[..., :1], one[:, :, :, :0], one[0])]
        wide = torch.zeros(BLOCKS, BLOCK_SIZE, GROUPS, 80, dtype=torch.uint8)
        others.append(replace(cache, tensors=(wide, one.contiguous())))  # 160 codes of one group
    if "static" in name:
        others.append(replace(cache, format=type(cache.format)(torch.ones(1))))  # type: ignore[call-arg]
    assert [other.view for other in others] == [None] * len(others)

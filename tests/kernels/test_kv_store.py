"""kv_store writes only to the given slots; rope_and_store equals norm, rotation and kv_store."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.capture import capture
from kernels.kv_format import PagedVectors, Unquantised, allocate
from kernels.kv_store import kv_store, reference, rope_and_store
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from kernels.threads import set_threads
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.cases import each
from tests.helpers.ways import any_way, compiled, computing, instruction_sets

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LONG_DTYPES = [pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:]]


def test_writes_slots_and_nothing_else() -> None:
    key_cache, value_cache = torch.full((2, 5, 4, 2, 8), torch.nan)  # N=5 blocks of B=4 slots
    slots = torch.tensor([19, 0, 7])
    key, value = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    caches = [PagedVectors((cache,), Unquantised(), 8, torch.float32) for cache in (key_cache, value_cache)]
    kv_store(key, value, *caches, slots)
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[4, 3], new[0])
        assert torch.equal(cache[0, 0], new[1])
        assert torch.equal(cache[1, 3], new[2])
        assert cache.isnan().sum() == (5 * 4 - 3) * 2 * 8


@pytest.mark.parametrize("dtype", [torch.float32, *LONG_DTYPES])
@each("channels", [8, 17, 64, 80, 576])
@each("name", NAMES)
def test_the_compiled_one_stores_the_same_bits(name: str, dtype: torch.dtype, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # a token's key and value are adjacent; at least three chunks of tokens
    fused = torch.randn(400, 3, 2 * channels, generator=generator).to(dtype)
    fused *= torch.logspace(-9, 4, 400)[:, None, None].to(dtype)
    fused[5], fused[6, 1, 3], fused[7, 2, 1] = 0, torch.nan, -torch.inf
    key, value = fused[..., :channels].contiguous(), fused[..., channels:]
    slots = torch.randperm(640, generator=generator)[:400]

    def stored(store: Callable[..., None]) -> list[Tensor]:
        caches = [allocate(format, (40, 16, 3), channels, dtype, torch.device("cpu")) for format in formats_of(name, 3)]
        tensors = caches[0].tensors + caches[1].tensors
        for part in tensors:
            part.copy_(torch.full(part.shape, torch.nan if part.dtype.is_floating_point else 99.0))
        store(key, value, caches[0], caches[1], slots)
        return [part.float() if part.dtype == torch.float8_e4m3fn else part for part in tensors]

    wanted = stored(reference.kv_store)
    for way in instruction_sets():
        with computing(way):
            set_threads(3)
            for part, expected in zip(stored(kv_store), wanted, strict=True):
                torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)


def caches_of(name: str, channels: int, dtype: torch.dtype) -> list[PagedVectors]:
    """Return caches of 25 blocks of 16 slots for 2 heads. No byte of them is 0 or occurs in a stored number."""
    caches = [allocate(format, (25, 16, 2), channels, dtype, torch.device("cpu")) for format in formats_of(name, 2)]
    for part in caches[0].tensors + caches[1].tensors:
        part.view(torch.uint8).fill_(0x5A)
    return caches


def new_tokens(count: int, channels: int, turning: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return query [T, 5, D], key and value [T, 2, D] (slices of one tensor, as from a fused product), cos and sin [T,
    R/2], and slots."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(count, 9, channels, generator=generator).to(dtype)
    angles = torch.rand(count, turning // 2, generator=generator) * 100
    parts = [*fused.split((5, 2, 2), dim=1), angles.cos().to(dtype), angles.sin().to(dtype)]
    return parts, torch.randperm(400, generator=generator)[:count]


def norms_of(channels: int, dtype: torch.dtype) -> list[Tensor]:
    return list(torch.randn(2, channels, generator=torch.Generator().manual_seed(1)).to(dtype))


def one_after_the_other(
    new: list[Tensor], caches: list[PagedVectors], slots: Tensor, interleaved: bool, norms: list[Tensor]
) -> Tensor:
    query, key, value, cos, sin = new
    if norms:
        query, key = rms_norm(query, norms[0], 1e-6), rms_norm(key, norms[1], 1e-6)
    kv_store(rope(key, cos, sin, interleaved), value, *caches, slots)
    return rope(query, cos, sin, interleaved)


def assert_stored_alike(ours: list[PagedVectors], expected: list[PagedVectors]) -> None:
    for cache, other in zip(ours, expected, strict=True):
        for part, wanted in zip(cache.tensors, other.tensors, strict=True):
            assert part.view(torch.uint8).equal(wanted.view(torch.uint8))


@pytest.mark.long
@compiled
@each("channels, turning, interleaved", [(64, 64, False), (80, 20, True), (18, 18, False)])
@each("name", NAMES)
@each("dtype", DTYPES)
def test_one_call_gives_the_bits_of_norm_turn_and_store(
    name: str, dtype: torch.dtype, channels: int, turning: int, interleaved: bool
) -> None:
    new, slots = new_tokens(200, channels, turning, dtype)
    new[1][5], new[1][6, 1, 3], new[2][7, 1, 1] = 0, torch.nan, -torch.inf
    norms = norms_of(channels, dtype)
    for norm_weights, options in (([], ()), (norms, (*norms, 1e-6))):
        expected_caches = caches_of(name, channels, dtype)
        set_threads(1)
        expected = one_after_the_other(new, expected_caches, slots, interleaved, norm_weights)
        for threads in (1, 2, 4):
            set_threads(threads)
            caches = caches_of(name, channels, dtype)
            query = rope_and_store(*new, *caches, slots, interleaved, *options)
            assert query.view(torch.uint8).equal(expected.view(torch.uint8))
            assert_stored_alike(caches, expected_caches)


@compiled
@each("name", NAMES)
def test_a_token_alone_has_the_bits_it_has_among_others(name: str) -> None:
    set_threads(2)
    new, slots = new_tokens(300, 48, 48, torch.bfloat16)
    norms = norms_of(48, torch.bfloat16)
    together, alone = caches_of(name, 48, torch.bfloat16), caches_of(name, 48, torch.bfloat16)
    expected = rope_and_store(*new, *together, slots, False, *norms, 1e-6)
    for i in range(300):
        row = [part[i : i + 1] for part in new]
        assert rope_and_store(*row, *alone, slots[i : i + 1], False, *norms, 1e-6).equal(expected[i : i + 1])
    assert_stored_alike(alone, together)


@any_way
@each("interleaved", [False, True])
def test_norm_and_turn_match_float64(interleaved: bool) -> None:
    new, slots = new_tokens(63, 24, 16, torch.float32)
    norms, caches = norms_of(24, torch.float32), caches_of("none", 24, torch.float32)
    result = rope_and_store(*new, *caches, slots, interleaved, *norms, 1e-6)
    kept = [cache.tensors[0].flatten(0, 1)[slots] for cache in caches]

    def exact(x: Tensor, norm: Tensor) -> Tensor:
        x = x.double()
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
        pairs = (
            x[..., :16].unflatten(-1, (8, 2)) if interleaved else x[..., :16].unflatten(-1, (2, 8)).transpose(-1, -2)
        )
        pairs = torch.view_as_complex(pairs.contiguous()) * torch.complex(new[3].double(), new[4].double())[:, None]
        turned = torch.view_as_real(pairs)
        return torch.cat(((turned if interleaved else turned.transpose(-1, -2)).flatten(-2), x[..., 16:]), dim=-1)

    # of numbers up to 20: roundings of the norm, the weight, and two products and their sum in float32
    torch.testing.assert_close(result.double(), exact(new[0], norms[0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(kept[0].double(), exact(new[1], norms[1]), rtol=0, atol=1e-5)
    assert kept[1].equal(new[2])


@compiled
def test_a_recorded_call_turns_and_stores_what_its_inputs_hold_by_then() -> None:
    set_threads(2)
    (new, slots), (others, other_slots) = (new_tokens(3, 32, 32, torch.bfloat16) for _ in range(2))
    others, other_slots = [part.flip(0).contiguous() for part in others], other_slots.flip(0) + 1
    caches, expected_caches = (caches_of("int8", 32, torch.bfloat16) for _ in range(2))
    graph, result = capture(lambda: rope_and_store(*new, *caches, slots))
    assert graph is not None
    for parts, where in ((new, slots), (others, other_slots)):
        expected: Any = rope_and_store(*parts, *expected_caches, where)
    for part, other in zip((*new, slots), (*others, other_slots), strict=True):
        part.copy_(other)
    graph.replay()
    assert result.equal(expected)
    assert_stored_alike(caches, expected_caches)

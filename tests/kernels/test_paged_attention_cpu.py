"""The C++ attention compared with the formula in float64 over the cache's content, and bits that do not depend on the
batch.

S sequences, H query heads in G groups, D channels per key, E per value. Of a sequence: Q new tokens, L tokens in all.
"""

import ctypes
import math
import mmap
import multiprocessing
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.kv_format import PagedVectors, Unquantised, allocate
from kernels.kv_store import kv_store
from kernels.paged_attention import paged_attention, reference
from kernels.threads import set_threads
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.cases import each
from tests.helpers.poison import poisoned
from tests.helpers.ways import compiled

Options = dict[str, Any]
BLOCK_SIZE = 16
# Sums are float32. Weights and the result of the two narrower dtypes are rounded, each by half a unit of 2^-8 (2^-11)
# of values up to 5.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 3e-3}
DTYPES = [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float16, "none")]
QUANTISED = [(dtype, name) for dtype in (torch.float32, torch.bfloat16) for name in NAMES[1:]]


@dataclass(frozen=True)
class Filled:
    """A cache with the keys and values of S sequences. All other elements are NaN, or 99 in dtypes without NaN."""

    keys: PagedVectors
    values: PagedVectors
    tables: Tensor  # [S, M]
    lengths: list[int]
    queries: list[Tensor]  # of every sequence [L, H, D]

    def vectors(self, cache: PagedVectors, s: int) -> Tensor:
        """Return the cached vectors of sequence s: [L, G, channels] float64."""
        blocks = self.tables[s, : -(-self.lengths[s] // BLOCK_SIZE)]
        stored = tuple(part[blocks].flatten(0, 1)[: self.lengths[s]] for part in cache.tensors)
        return cache.format.decode(stored)[..., : cache.channels].to(cache.dtype).double()


def fill(
    lengths: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, name: str = "none"
) -> Filled:
    """Return a filled cache. `sizes`: H, G, D, E. Values of 0 channels are the first 2/3 of the keys."""
    heads, groups, head_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(1)
    counts = [math.ceil(length / BLOCK_SIZE) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    caches = [
        allocate(format, (len(order), BLOCK_SIZE, groups), channels, dtype, torch.device("cpu"))
        for format, channels in zip(formats_of(name, groups), (head_dim, value_dim or head_dim), strict=True)
    ]
    for part in caches[0].tensors + caches[1].tensors:
        part.copy_(torch.full(part.shape, torch.nan if part.dtype.is_floating_point else 99.0))
    queries = []
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(count)])
        tables[s, :count] = blocks
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
        key, value = (torch.randn(length, groups, cache.channels, generator=generator).to(dtype) for cache in caches)
        kv_store(key, value, caches[0], caches[1], slots)
        queries.append(torch.randn(length, heads, head_dim, generator=generator).to(dtype))
    values = caches[1] if value_dim else replace(caches[0], channels=head_dim * 2 // 3)
    return Filled(caches[0], values, tables, lengths, queries)


def attend(filled: Filled, steps: list[tuple[int, int, int]], options: Options) -> list[Tensor]:
    """Compute a step. `steps`: sequence, and its token counts before and after this step. Returns [Q, H, E] of each."""
    sequences = [s for s, _, _ in steps]
    query = torch.cat([filled.queries[s][first:last] for s, first, last in steps])
    counts = [last - first for _, first, last in steps]
    per_sequence = {k: torch.stack((v, v), 1)[sequences][:, 0] for k, v in options.items() if k == "prefix_lengths"}
    result = paged_attention(
        query,
        filled.keys,
        filled.values,
        filled.tables[sequences],
        torch.tensor([0, *counts]).cumsum(0),
        torch.tensor([last for _, _, last in steps]),
        query.shape[2] ** -0.5,
        **(options | per_sequence),
    )
    return list(result.split(counts))


def formula(filled: Filled, s: int, first: int, options: Options) -> Tensor:
    """Return the formula's result for the tokens of sequence s from `first` on: [Q, H, E] float64."""
    keys, values = filled.vectors(filled.keys, s), filled.vectors(filled.values, s)
    query = filled.queries[s][first:].double()
    repeats = query.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,lhd->hql", query, keys.repeat_interleave(repeats, 1)) * query.shape[2] ** -0.5
    if cap := options.get("soft_cap"):
        scores = cap * (scores / cap).tanh()
    distance = torch.arange(len(keys)) - torch.arange(first, len(keys))[:, None]  # [Q, L]
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    prefix = int(options["prefix_lengths"][s]) if "prefix_lengths" in options else 0
    hidden = (distance > 0) & (torch.arange(len(keys)) >= prefix) | (distance <= -options.get("window", len(keys)))
    if chunk := options.get("chunk"):
        hidden |= torch.arange(len(keys)) < (torch.arange(first, len(keys)) // chunk * chunk)[:, None]
    sinks = (
        options.get("sinks", torch.full((len(scores),), -torch.inf))
        .double()[:, None, None]
        .expand(*scores.shape[:2], 1)
    )
    weights = torch.cat((scores.masked_fill(hidden, -torch.inf), sinks), -1).softmax(-1)[..., :-1]
    return torch.einsum("hql,lhe->qhe", weights, values.repeat_interleave(repeats, 1))


def check(filled: Filled, new: list[int], options: Options) -> None:
    steps = [(s, length - count, length) for s, (length, count) in enumerate(zip(filled.lengths, new, strict=True))]
    for (s, first, _), result in zip(steps, attend(filled, steps, options), strict=True):
        expected, tolerance = formula(filled, s, first, options), TOLERANCE[result.dtype]
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)


SIZES = [
    (4, 4, 8, 8),
    (8, 2, 64, 64),
    (3, 1, 80, 80),
    (8, 1, 128, 40),
    (2, 2, 17, 33),
    (2, 1, 576, 512),
    (70, 1, 24, 24),
]


@compiled
@each("sizes", SIZES)
@each("dtype, name", DTYPES)
@poisoned()
def test_equals_the_formula(dtype: torch.dtype, name: str, sizes: tuple[int, int, int, int]) -> None:
    lengths, new = [64, 5, 1, 63, 257, 1000], [1, 5, 1, 63, 7, 1]
    check(fill(lengths, sizes, dtype, name), new, {})


@compiled
@each("sizes", [(8, 2, 64, 64), (3, 1, 20, 37), (4, 1, 48, 0)])
@each("dtype, name", QUANTISED)
def test_reads_every_format(dtype: torch.dtype, name: str, sizes: tuple[int, int, int, int]) -> None:
    check(fill([64, 5, 300], sizes, dtype, name), [1, 5, 7], {})


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
SINKS = torch.tensor([0.5, -3.0, 4.0, 9.0])
OPTIONS: list[Options] = [
    {"soft_cap": 0.7},
    {"soft_cap": 50.0, "chunk": 70},
    {"window": 1},
    {"window": 65},
    {"window": 300},
    {"alibi_slopes": SLOPES},
    {"sinks": SINKS, "window": 65},
    {"prefix_lengths": torch.tensor([10, 3, 7, 290, 0])},
    {"soft_cap": 2.0, "window": 90, "alibi_slopes": SLOPES, "sinks": SINKS},
]


@compiled
@each("options", OPTIONS)
def test_options(options: Options) -> None:
    for sizes in ((4, 1, 16, 16), (4, 4, 64, 64)):
        check(fill([64, 5, 1, 300, 600], sizes), [1, 5, 1, 300, 200], options)


@pytest.mark.long
@compiled
@each("heads, groups", [(1, 1), (4, 1), (16, 2)])
def test_long_prompt_whole(heads: int, groups: int) -> None:
    check(fill([1000], (heads, groups, 64, 64)), [1000], {})


EXACT = [
    (torch.float32, "none", {}),
    (torch.bfloat16, "none", {}),
    (torch.bfloat16, "int8", {"chunk": 100, "sinks": SINKS}),
    (torch.float32, "int4", {"soft_cap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS}),
    (torch.float32, "int8 static", {}),
    (torch.bfloat16, "fp8 static", {"window": 50}),
]


@pytest.mark.long
@compiled
@each("dtype, name, options", EXACT)
def test_a_token_is_the_same_to_the_bit_in_one_step_in_chunks_and_in_company(
    dtype: torch.dtype, name: str, options: Options
) -> None:
    filled = fill([530, 40, 333], (4, 2, 48, 48), dtype, name)
    batch_results = [attend(filled, [(s, 0, length)], options)[0] for s, length in enumerate(filled.lengths)]
    for threads, size in ((1, 1), (4, 5), (3, 16), (2, 300)):
        set_threads(threads)
        chunks: list[list[Tensor]] = [[], [], []]
        for first in range(0, max(filled.lengths), size):
            left = [s for s, length in enumerate(filled.lengths) if length > first]
            steps = [(s, first, min(first + size, filled.lengths[s])) for s in left]
            for s, result in zip(left, attend(filled, steps, options), strict=True):
                chunks[s].append(result)
        for s, expected in enumerate(batch_results):
            assert torch.equal(torch.cat(chunks[s]), expected)


@compiled
@each("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_share_a_key_are_the_same_to_the_bit_on_any_number_of_threads(dtype: torch.dtype) -> None:
    filled = fill([200, 70, 257], (24, 1, 48, 32), dtype)
    short = ([(0, 199, 200)], [(0, 199, 200), (1, 69, 70)], [(1, 60, 70)])
    # the last: one token attends to 256 keys, a split, and one to 257
    for steps in (*short, [(2, 256, 257)], [(2, 255, 257)]):
        set_threads(1)
        alone = attend(filled, steps, {})
        for threads in range(2, 5):
            set_threads(threads)
            assert all(torch.equal(*pair) for pair in zip(attend(filled, steps, {}), alone, strict=True))


def attend_before_the_end_of_a_page() -> None:
    torch.set_num_threads(1)  # the threads of the forked process do not exist here, and torch would wait for them
    caches, pages = [], []
    for _ in range(2):
        pages.append(mmap.mmap(-1, 2 * mmap.PAGESIZE))
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages[-1]))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        # the sequence fills the first page; the second page must not be read
        shape = (1, 16, mmap.PAGESIZE // 16 // 32, 8)
        cache = torch.frombuffer(pages[-1], dtype=torch.float32, count=mmap.PAGESIZE // 4).view(shape).normal_()
        caches.append(PagedVectors((cache,), Unquantised(), 8, torch.float32))
    one = torch.tensor([[0], [1], [16]])
    inputs = torch.ones(1, shape[2], 8), *caches, one[:1], one[:2, 0], one[2], 0.3
    assert (paged_attention(*inputs) - reference.paged_attention(*inputs)).abs().max() < 1e-5


@pytest.mark.forks
@compiled
def test_nothing_behind_a_cache_is_read() -> None:
    """For caches that `allocate` did not make, such as caches passed to an exported step. A read beyond them would end
    the process."""
    child = multiprocessing.get_context("fork").Process(target=attend_before_the_end_of_a_page)
    child.start()
    child.join()
    assert child.exitcode == 0


@compiled
def test_nan_queries_change_only_their_own_outputs() -> None:
    filled = fill([30, 30], (2, 1, 16, 16))
    filled.queries[0][7] = torch.nan
    first, second = attend(filled, [(0, 0, 30), (1, 0, 30)], {})
    assert first[7].isnan().all()
    assert first[8:].isfinite().all()
    assert first[:7].isfinite().all()
    assert second.isfinite().all()


@compiled
@each("bad", [torch.nan, torch.inf, -torch.inf])
@each("options", [{}, {"window": 5}, {"prefix_lengths": torch.tensor([3])}])
@each("dtype, name", [*DTYPES, (torch.bfloat16, "int8"), (torch.float32, "fp8 static")])
def test_a_token_has_the_bits_of_a_step_without_those_after_it(
    dtype: torch.dtype, name: str, options: Options, bad: float
) -> None:
    """The later tokens have any values, because the token does not attend to them."""
    filled = fill([150], (4, 2, 24, 24), dtype, name)
    value = torch.ones(1, 2, 24, dtype=dtype)
    value[0, :, 7] = bad
    kv_store(torch.ones_like(value), value, filled.keys, filled.values, filled.tables[0, 4:5] * BLOCK_SIZE + 6)
    (batch_result,) = attend(filled, [(0, 0, 150)], options)
    parts = [attend(filled, [(0, *part)], options)[0] for part in ((0, 70), (70, 73), (73, 150))]
    assert torch.equal(batch_result.nan_to_num(7), torch.cat(parts).nan_to_num(7))
    sees = slice(70, 75 if "window" in options else 150)
    assert not batch_result[sees, :, 7].isfinite().any()
    assert torch.cat((batch_result[:70], batch_result[sees.stop :])).isfinite().all()


@compiled
@each("bad", [torch.nan, torch.inf, -torch.inf])
@each("channels", [16, 21])
@each("dtype, name", [pair for pair in QUANTISED if "static" in pair[1]])
def test_static_scales_do_not_hide_it(dtype: torch.dtype, name: str, channels: int, bad: float) -> None:
    filled = fill([30], (2, 1, channels, channels), dtype, name)
    value = torch.full((1, 1, channels), -1e30, dtype=dtype)  # saturates
    value[0, 0, channels - 2] = bad
    slot = filled.tables[0, :1] * BLOCK_SIZE + 12
    kv_store(torch.ones_like(value), value, filled.keys, filled.values, slot)
    (result,) = attend(filled, [(0, 0, 30)], {})
    assert result[12:, :, channels - 2].isnan().all()
    assert result[:, :, : channels - 2].isfinite().all()
    assert result[:, :, channels - 1].isfinite().all()

"""The row-wise kernels (norms, activations, rotation, cache writes) compared with their references."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.gated_delta.reference
import kernels.gated_delta.triton
import kernels.gated_rms_norm.reference
import kernels.gated_rms_norm.triton
import kernels.gelu.reference
import kernels.gelu.triton
import kernels.kv_store.reference
import kernels.kv_store.triton
import kernels.layer_norm.reference
import kernels.layer_norm.triton
import kernels.quantize_rows.triton
import kernels.rms_norm.reference
import kernels.rms_norm.triton
import kernels.rope.reference
import kernels.rope.triton
import kernels.short_conv.reference
import kernels.short_conv.triton
import kernels.sigmoid_gate.reference
import kernels.sigmoid_gate.triton
import kernels.ssd.reference
import kernels.ssd.triton
import kernels.swiglu.reference
import kernels.swiglu.triton
from kernels.kv_format import PagedVectors, allocate
from kernels.quantize_rows import ActivationFormat
from kernels.state_panels import state_shape
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.cases import each
from tests.helpers.triton_cases import DEVICE, FP8, assert_near, noise, tiers

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODES = [ActivationFormat(torch.int8), ActivationFormat(FP8), ActivationFormat(FP8, 128), ActivationFormat(FP8, 48)]
# no program can split a row into groups of 48 channels


@each("dtype, shape", product(DTYPES, [(1, 16), (5, 80), (3, 1000), (2, 3, 64)]))
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1), noise(shape[-1], dtype=dtype)
    result = kernels.rms_norm.triton.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert_near(result, kernels.rms_norm.reference.rms_norm(x, weight, 1e-5))
    result = kernels.rms_norm.triton.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, 1.0)
    assert_near(result, kernels.rms_norm.reference.rms_norm(x, weight, 1e-5, 1.0))
    results = kernels.rms_norm.triton.add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-5, 1.0)
    expected = kernels.rms_norm.reference.add_rms_norm(x, residual, weight, 1e-5, 1.0)
    assert_near(results[0], expected[0])
    assert torch.equal(results[1].cpu(), expected[1])


@each("dtype, shape, group_size", product(DTYPES, [(5, 80), (1, 1000)], [20, 40]))
def test_gated_rms_norm(dtype: torch.dtype, shape: tuple[int, int], group_size: int) -> None:
    both = noise(shape[0], 2 * shape[1], dtype=dtype) * 30  # exp of the least overflows; halves of one matrix
    weight = noise(shape[1], dtype=dtype, seed=1)
    for gates_output in (False, True):
        options = group_size, 1e-5, gates_output
        placed = *both.to(DEVICE).chunk(2, dim=-1), weight.to(DEVICE)
        result = kernels.gated_rms_norm.triton.gated_rms_norm(*placed, *options)
        assert_near(result, kernels.gated_rms_norm.reference.gated_rms_norm(*both.chunk(2, dim=-1), weight, *options))


@each("dtype, shape", product(DTYPES, [(1, 16), (5, 80), (3, 1000)]))
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = noise(*shape, dtype=dtype) + 4
    weight, bias = noise(shape[-1], dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    for parameters in ((weight, bias), (weight, None), (None, None)):
        placed = [part if part is None else part.to(DEVICE) for part in parameters]
        expected = kernels.layer_norm.reference.layer_norm(x, *parameters, 1e-5)
        assert_near(kernels.layer_norm.triton.layer_norm(x.to(DEVICE), *placed, 1e-5), expected)
    codes, scales = kernels.layer_norm.triton.layer_norm_quantize(x.to(DEVICE), *placed, 1e-5, torch.int8, None)
    assert_near((codes.float() * scales).to(dtype), expected, 1 / 127)  # half a code, and an adjacent code


@each("dtype, shape", product(DTYPES, [(1, 1), (5, 80), (3, 1030)]))
def test_gelu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    both = noise(shape[0], 2 * shape[1], dtype=dtype) * 30  # exp of the largest overflows; halves of one matrix
    x, up = both.chunk(2, dim=-1)
    on_device, up_on_device = both.to(DEVICE).chunk(2, dim=-1)
    actual, expected = kernels.gelu.triton, kernels.gelu.reference
    assert_near(actual.gelu(on_device), expected.gelu(x))
    assert_near(actual.gelu_tanh(on_device), expected.gelu_tanh(x))
    assert_near(actual.gelu_tanh(on_device, up_on_device), expected.gelu_tanh(x, up))


@each("dtype, shape", product(DTYPES, [(1, 1), (5, 80), (3, 1030)]))
def test_swiglu_and_sigmoid_gate(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    both = noise(shape[0], 2 * shape[1], dtype=dtype) * 30  # exp of the least overflows; halves of one matrix
    gate, up = both.chunk(2, dim=-1)
    assert_near(
        kernels.swiglu.triton.swiglu(*both.to(DEVICE).chunk(2, dim=-1)), kernels.swiglu.reference.swiglu(gate, up)
    )
    for gates in (gate, gate[:, :1]):
        result = kernels.sigmoid_gate.triton.sigmoid_gate(up.to(DEVICE), gates.to(DEVICE))
        assert_near(result, kernels.sigmoid_gate.reference.sigmoid_gate(up, gates))


@each("dtype, group_size", product([torch.int8, FP8], [None, 128]))
def test_quantize_rows(dtype: torch.dtype, group_size: int | None) -> None:
    x = noise(5, 300)
    x[1], x[2, 7], x[3, 0] = 0, torch.nan, -torch.inf
    codes, scales = (part.cpu() for part in kernels.quantize_rows.triton.quantize_rows(x.to(DEVICE), dtype, group_size))
    assert scales.shape == (5, 1 if group_size is None else 3)
    assert scales[1].eq(1).all()
    assert scales[2:4, 0].isnan().all()
    for start in range(0, 300, group_size or 300):
        part = slice(start, start + (group_size or 300))
        largest = x[[0, 4], part].abs().amax(1, keepdim=True)
        scale = largest / (127 if dtype == torch.int8 else 448)
        assert torch.equal(scales[[0, 4], start // (group_size or 300), None], scale)
        steps = x[[0, 4], part] / scale
        wanted = steps.round().to(torch.int8) if dtype == torch.int8 else steps.to(dtype)
        assert torch.equal(codes[[0, 4], part].float(), wanted.float())


@tiers("codes, shape, dtype", CODES, [(5, 80), (1, 16), (5, 520), (0, 16)], DTYPES)
def test_norms_and_swiglu_make_codes_in_one_launch(
    codes: ActivationFormat, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bit for bit equal to the kernels of norm or activation and of codes in sequence. On a GPU, threads share a row in
    another way, and the last bit of a norm may change a code to an adjacent one."""
    x, residual, both = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1), noise(shape[0], 2 * shape[1])
    if len(x) > 1:
        x[1], x[2, 7], residual[1], residual[3, 0] = 0, torch.nan, 0, -torch.inf
        both[1], both[2, -1] = 0, torch.nan
    x, residual, weight = x.to(DEVICE), residual.to(DEVICE), noise(shape[1], dtype=dtype).to(DEVICE)
    quantize = kernels.quantize_rows.triton.quantize_rows
    norm, gates = kernels.rms_norm.triton, both.to(DEVICE, dtype).chunk(2, dim=1)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    pairs = [
        (norm.rms_norm_quantize(x, weight, 1e-5, *codes[:2]), quantize(norm.rms_norm(x, weight, 1e-5), *codes[:2])),
        (norm.add_rms_norm_quantize(x, residual, weight, 1e-5, *codes[:2]), (*quantize(normed, *codes[:2]), total)),
        (
            kernels.swiglu.triton.swiglu_quantize(*gates, *codes[:2]),
            quantize(kernels.swiglu.triton.swiglu(*gates), *codes[:2]),
        ),
    ]
    for results, expected in pairs:
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == wanted.dtype
            # a step between two codes, or a unit of bfloat16 in the number that defines a scale
            rtol, atol = (0, 0) if DEVICE == "cpu" else (1 / 8, 1) if result.itemsize == 1 else (2**-7, 0)
            torch.testing.assert_close(result.float(), wanted.float(), rtol=rtol, atol=atol, equal_nan=True)
    if len(x) > 1:
        for (_, scales, *_), _ in pairs:
            assert scales[2].isnan().any()
            assert not scales[[0, 1, 4]].isnan().any()


@each("dtype, interleaved, sizes", product(DTYPES, [False, True], [(1, 16, 16), (3, 80, 80), (6, 64, 20)]))
def test_rope(dtype: torch.dtype, interleaved: bool, sizes: tuple[int, int, int]) -> None:
    heads, channels, turned = sizes
    wide = noise(5, heads + 2, channels + 4, dtype=dtype)
    angles = noise(5, turned // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = kernels.rope.reference.rope(wide[:, 1:-1, :channels], cos, sin, interleaved)
    x = wide.to(DEVICE)[:, 1:-1, :channels]
    assert_near(kernels.rope.triton.rope(x, cos.to(DEVICE), sin.to(DEVICE), interleaved), expected)


def stored(
    store: Callable[..., None], kv_cache: str, key: Tensor, value: Tensor, slots: Tensor, device: str
) -> tuple[PagedVectors, ...]:
    caches = []
    for format, vectors in zip(formats_of(kv_cache, key.shape[1], device), (key, value), strict=True):
        cache = allocate(format, (5, 4, key.shape[1]), vectors.shape[-1], key.dtype, torch.device(device))
        for part in cache.tensors:
            part.copy_(torch.full(part.shape, 77))
        caches.append(cache)
    store(key.to(device), value.to(device), *caches, slots.to(device))
    return tuple(caches)


# key/value heads, channels of keys (34: the last group of int4 is padded) and of values
@tiers("kv_cache, sizes, dtype", NAMES, [(3, 80, 30), (1, 8, 8), (2, 34, 64)], DTYPES)
def test_kv_store_writes_the_same_bits(kv_cache: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    groups, key_dim, value_dim = sizes
    slots = torch.tensor([19, 0, 7, 3, 12])
    key, value = noise(5, groups, key_dim, dtype=dtype), noise(5, groups, value_dim, dtype=dtype, seed=1)
    key[1], key[2, 0, 3], key[3] = 0, 500, -0.125
    pairs = zip(
        stored(kernels.kv_store.triton.kv_store, kv_cache, key, value, slots, DEVICE),
        stored(kernels.kv_store.reference.kv_store, kv_cache, key, value, slots, "cpu"),
        strict=True,
    )
    for ours, expected in pairs:
        for part, wanted in zip(ours.tensors, expected.tensors, strict=True):
            assert torch.equal(part.cpu().view(torch.uint8), wanted.view(torch.uint8))


@each("kv_cache, odd", product(NAMES, [torch.nan, torch.inf, -torch.inf]))
def test_non_finite_values_are_not_hidden(kv_cache: str, odd: float) -> None:
    key = noise(2, 1, 16)
    key[0, 0, 5] = odd
    cache, _ = stored(kernels.kv_store.triton.kv_store, kv_cache, key, key, torch.tensor([1, 2]), DEVICE)
    read = cache.format.decode(tuple(part.cpu().flatten(0, 1)[1:3] for part in cache.tensors))
    assert not read[0].isfinite().all()
    assert read[1].isfinite().all()


def test_values_may_have_no_channels() -> None:
    """As in a cache of latents."""
    key, slots = noise(2, 1, 24), torch.tensor([3, 1])
    cache, _ = stored(kernels.kv_store.triton.kv_store, "none", key, key[..., :0], slots, DEVICE)
    assert torch.equal(cache.tensors[0].cpu().flatten(0, 1)[slots], key)


@each("kv_cache", NAMES)
def test_padding_is_not_stored(kv_cache: str) -> None:
    key = noise(3, 2, 16)
    cache, _ = stored(kernels.kv_store.triton.kv_store, kv_cache, key, key, torch.tensor([-1, 2, -1]), DEVICE)
    for part in cache.tensors:
        untouched = torch.cat((part.flatten(0, 1)[:2], part.flatten(0, 1)[3:])).cpu()
        assert torch.equal(untouched.float(), torch.full(untouched.shape, 77.0).to(part.dtype).float())


# query heads (a program has eight), key/value heads, channels, rotated channels, whether the rotation is interleaved
SIZES = [(9, 2, 80, 20, True), (1, 1, 16, 16, False), (6, 3, 34, 34, False)]


@pytest.mark.long
@tiers("kv_cache, sizes, dtype", NAMES, SIZES, DTYPES)
def test_turning_and_storing_in_one_launch(
    kv_cache: str, sizes: tuple[int, int, int, int, bool], dtype: torch.dtype
) -> None:
    """Bit for bit equal to the kernels of norm, rotation and store in sequence; padding is not stored."""
    heads, groups, channels, turning, interleaved = sizes
    fused = noise(3, heads + 2 * groups, channels, dtype=dtype).to(DEVICE)
    query, key, value = fused.split((heads, groups, groups), dim=1)
    angles, norms = noise(3, turning // 2), noise(2, channels, dtype=dtype, seed=1).to(DEVICE)
    cos, sin, slots = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype), torch.tensor([19, -1, 7])
    for norm_weights in (None, norms):
        normed = [query, key]
        if norm_weights is not None:
            pairs = zip(normed, norm_weights, strict=True)
            normed = [kernels.rms_norm.triton.rms_norm(part, norm, 1e-6) for part, norm in pairs]
        turned = [kernels.rope.triton.rope(part, cos, sin, interleaved) for part in normed]
        expected = stored(kernels.kv_store.triton.kv_store, kv_cache, turned[1], value, slots, DEVICE)
        outputs = []

        def store(
            key: Tensor, value: Tensor, *where: Any, norm_weights: Tensor | None = norm_weights, outputs: Any = outputs
        ) -> None:
            options = () if norm_weights is None else (*norm_weights, 1e-6)
            outputs.append(
                kernels.kv_store.triton.rope_and_store(query, key, value, cos, sin, *where, interleaved, *options)
            )

        ours = stored(store, kv_cache, key, value, slots, DEVICE)
        assert torch.equal(outputs[0], turned[0])
        for cache, wanted in zip(ours, expected, strict=True):
            for part, other in zip(cache.tensors, wanted.tensors, strict=True):
                assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))


def recurrent_steps() -> list[Tensor]:
    """Return query_starts, reads, writes and ends of sequences that begin, go on in place or elsewhere, have drafts or
    no token, and are padding."""
    slots = torch.tensor([[-1, 2, 3, 1, -1], [0, 2, 4, 1, -1], [3, 6, 7, 8, 0]])
    return [torch.tensor([0, 5, 6, 8, 8, 8]), *slots]


@each("dtype, channels, num_taps", [(torch.float32, 300, 3), (torch.bfloat16, 16, 2), (torch.float16, 129, 4)])
def test_short_conv(dtype: torch.dtype, channels: int, num_taps: int) -> None:
    arguments = recurrent_steps()
    gated, weight = noise(8, 3 * channels, dtype=dtype), noise(num_taps, channels, dtype=dtype, seed=1)
    states, bias = noise(5, num_taps - 1, channels, dtype=dtype, seed=2), noise(channels, dtype=dtype, seed=3)
    for projected, given_bias in ((gated, bias), (gated, None), (gated[:, :channels], bias)):
        ours, theirs = states.clone().to(DEVICE), states.clone()
        placed = [None if part is None else part.to(DEVICE) for part in (projected, weight, given_bias)]
        result = kernels.short_conv.triton.short_conv(*placed, ours, *(part.to(DEVICE) for part in arguments))
        assert_near(result, kernels.short_conv.reference.short_conv(projected, weight, given_bias, theirs, *arguments))
        assert ours.cpu().equal(theirs)


def check_recurrence(actual: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Any]) -> None:
    """Compare the results and the states, which are input 5. Input 7 is the number of columns."""
    placed = [part.clone().to(DEVICE) if isinstance(part, Tensor) else part for part in inputs]
    assert_near(actual(*placed), reference(*inputs))
    ours, theirs = (part[5].cpu().transpose(2, 3).flatten(3)[..., : inputs[7]] for part in (placed, inputs))
    # Sums of channels in another order, in float32.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@each("dtype, num_rows, num_columns", [(torch.float32, 24, 40), (torch.bfloat16, 16, 32), (torch.float16, 33, 5)])
def test_recurrences(dtype: torch.dtype, num_rows: int, num_columns: int) -> None:
    steps = *recurrent_steps(), torch.tensor([5, 9, 40, 64, 0])
    sizes, states = (2, num_columns), noise(5, *state_shape(3, num_rows, num_columns), seed=3)
    mixed, gates = noise(8, 4 * num_rows + 3 * num_columns, dtype=dtype), noise(2, 8, 3, dtype=dtype, seed=1)
    of_heads, of_rows = noise(3, 3, seed=2), (noise(8, 3 * num_rows, dtype=dtype), noise(3 * num_rows, seed=4))
    for decay, bias in ((gates[0], of_heads[1]), of_rows):
        check_recurrence(
            kernels.gated_delta.triton.gated_delta,
            kernels.gated_delta.reference.gated_delta,
            [mixed, decay, gates[1], of_heads[0], bias, states.clone(), *sizes, *steps],
        )
    check_recurrence(
        kernels.ssd.triton.ssd,
        kernels.ssd.reference.ssd,
        [mixed, gates[0], *of_heads, states.clone(), *sizes, 0.1, 2.0, *steps],
    )

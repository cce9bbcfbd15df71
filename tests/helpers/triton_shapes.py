"""Launches of every kernel in the shapes of real models, one per class that compiles differently. On the default
device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.gated_delta.triton import gated_delta
from kernels.gated_rms_norm.triton import gated_rms_norm
from kernels.gelu.triton import gelu, gelu_tanh
from kernels.kv_format import FORMATS, allocate
from kernels.kv_store.triton import kv_store, rope_and_store
from kernels.layer_norm.triton import layer_norm
from kernels.linear.gpu_weight import GPUWeight, of_floats
from kernels.linear.triton import matmul
from kernels.lora.table import AdapterTable
from kernels.lora.triton import lora_add
from kernels.mask_logits.triton import mask_logits
from kernels.moe.triton import mixture, route
from kernels.paged_attention.triton import paged_attention
from kernels.quantize_rows import ActivationFormat, QuantizedActivations
from kernels.quantize_rows.triton import quantize_rows
from kernels.rms_norm.triton import add_rms_norm, add_rms_norm_quantize, rms_norm, rms_norm_quantize
from kernels.rope.triton import rope
from kernels.sampling.triton import draw
from kernels.short_conv.triton import short_conv
from kernels.sigmoid_gate.triton import sigmoid_gate
from kernels.ssd.triton import ssd
from kernels.swiglu.triton import swiglu, swiglu_quantize
from tests.helpers.cache_formats import NAMES, formats_of
from tests.helpers.triton_cases import EXPERT_FORMATS, FP8

BF16 = torch.bfloat16

MODELS = {  # query heads, key/value heads, channels
    "llama-3.1-8b": (32, 8, 128),
    "qwen2.5-1.5b": (12, 2, 128),
    "baichuan-13b": (40, 40, 128),
    "bloom-3b": (32, 32, 80),
    "gemma-2-9b": (16, 8, 256),
    "gpt-oss-20b": (64, 8, 64),
}


def attend(
    model: str,
    num_tokens: int,
    num_sequences: int,
    kv_cache: str = "none",
    dtype: torch.dtype = BF16,
    longest: int = 8192,
    **options: Any,
) -> None:
    heads, groups, channels = MODELS[model]
    device = torch.get_default_device()
    formats = formats_of(kv_cache, groups, str(device))
    caches = [allocate(format, (1024, 16, groups), channels, dtype, device) for format in formats]
    ints = partial(torch.zeros, dtype=torch.int64)
    query = torch.empty(num_tokens, heads, channels, dtype=dtype)
    tables = ints(num_sequences, longest // 16)
    paged_attention(query, *caches, tables, ints(num_sequences + 1), ints(num_sequences), channels**-0.5, **options)


def attend_latent(num_tokens: int, num_sequences: int) -> None:
    """Launch DeepSeek-V2-Lite's attention: keys of 512 + 64 channels, whose first 512 are the values."""
    ints = partial(torch.zeros, dtype=torch.int64)
    keys = allocate(FORMATS["none"][0], (1024, 16, 1), 576, BF16, torch.get_default_device())
    values = type(keys)(keys.tensors, keys.format, 512, keys.dtype)
    query = torch.empty(num_tokens, 16, 576, dtype=BF16)
    tables = ints(num_sequences, 512)
    paged_attention(query, keys, values, tables, ints(num_sequences + 1), ints(num_sequences), 576**-0.5)


def store(kv_cache: str, model: str = "llama-3.1-8b") -> None:
    """Store keys unrotated, rotated, rotated after a norm, and half rotated."""
    heads, groups, channels = MODELS[model]
    device = torch.get_default_device()
    formats = formats_of(kv_cache, groups, str(device))
    caches = [allocate(format, (1024, 16, groups), channels, BF16, device) for format in formats]
    query = torch.empty(64, heads, channels, dtype=BF16)
    key, value = torch.empty(2, 64, groups, channels, dtype=BF16)
    slots, angles, norm = torch.zeros(64, dtype=torch.int64), torch.empty(64, channels // 2, dtype=BF16), key[0, 0]
    kv_store(key, value, *caches, slots)
    rope_and_store(query, key, value, angles, angles, *caches, slots)
    rope_and_store(query, key, value, angles, angles, *caches, slots, False, norm, norm, 1e-6)
    half = angles[:, : channels // 4]
    rope_and_store(query, key, value, half, half, *caches, slots, True)


def rows() -> None:
    x = torch.empty(64, 4096, dtype=BF16)
    rms_norm(x, x[0], 1e-5)
    add_rms_norm(x, x, x[0], 1e-5)
    rms_norm(torch.empty(64, 32, 128, dtype=BF16), x[0, :128], 1e-5)
    rms_norm(x, x[0], 1e-5, 1.0)
    gated_rms_norm(x, x, x[0], 4096, 1e-5)
    gated_rms_norm(x, x, x[0], 512, 1e-5)
    gated_rms_norm(x, x, x[0], 128, 1e-5, True)
    sigmoid_gate(x, x)
    sigmoid_gate(x, x[:, :1])
    layer_norm(x, x[0], x[0], 1e-5)
    layer_norm(x, None, None, 1e-5)
    gelu(x)
    gelu_tanh(x)
    gelu_tanh(x, x)
    swiglu(torch.empty(64, 14336, dtype=BF16), torch.empty(64, 14336, dtype=BF16))
    angles = torch.empty(64, 64, dtype=BF16)
    for interleaved in (False, True):
        rope(torch.empty(64, 32, 128, dtype=BF16), angles, angles, interleaved)
    for codes in (ActivationFormat(torch.int8), ActivationFormat(FP8), ActivationFormat(FP8, 128)):
        quantize_rows(x, *codes)
        rms_norm_quantize(x, x[0], 1e-5, codes.dtype, codes.group_size)
        add_rms_norm_quantize(x, x, x[0], 1e-5, codes.dtype, codes.group_size)
        swiglu_quantize(*torch.empty(2, 64, 14336, dtype=BF16), codes.dtype, codes.group_size)
    for dtype in (torch.int8, FP8):
        quantize_rows(x, dtype, static_scales=torch.empty(64))
    projected, slots = torch.empty(64, 3 * 2048, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    states, starts = torch.empty(8, 2, 2048, dtype=BF16), torch.zeros(5, dtype=torch.int64)
    steps = starts, slots, slots, starts[1:]
    short_conv(projected, torch.empty(3, 2048, dtype=BF16), None, states, *steps)
    short_conv(projected[:, :2048].contiguous(), torch.empty(3, 2048, dtype=BF16), None, states, *steps)
    steps = *steps, slots
    gates, matrices = torch.empty(64, 32, dtype=BF16), torch.empty(8, 32, 4, 128, 32)
    qkv = torch.empty(64, 8192, dtype=BF16)
    gated_delta(qkv, gates, gates, torch.empty(32), torch.empty(32), matrices, 2, 128, *steps)
    gated_delta(
        torch.empty(64, 12288, dtype=BF16), x, gates, torch.empty(32), torch.empty(4096), matrices, 1, 128, *steps
    )
    matrices, xbc = torch.empty(8, 32, 2, 128, 32), torch.empty(64, 32 * 64 + 2 * 128, dtype=BF16)
    ssd(xbc, gates, *torch.empty(3, 32), matrices, 32, 64, 0.0, torch.inf, *steps)


def multiply(
    num_rows: int,
    bits: int,
    groups: int,
    zero_points: bool = False,
    inputs: int = 4096,
    outputs: int = 14336,
    dtype: torch.dtype = torch.int8,
    scale_dtype: torch.dtype = torch.float32,
) -> None:
    codes = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8 if bits == 4 else dtype)
    zeros = torch.empty(groups, outputs, dtype=torch.int8) if zero_points else None
    chunk = 128 if groups == 1 else inputs // groups
    scales = torch.empty(groups, outputs, dtype=scale_dtype)
    matmul(torch.empty(num_rows, inputs, dtype=BF16), GPUWeight(codes, scales, zeros, inputs, chunk))


def multiply_nvfp4(num_rows: int) -> None:
    matmul(torch.empty(num_rows, 4096, dtype=BF16), nvfp4(torch.empty(14336, 2048, dtype=torch.uint8)))


def nvfp4(codes: torch.Tensor) -> GPUWeight:
    """Return the weight of codes [..., N, K / 2]."""
    *experts, outputs, half = codes.shape
    group_scales = torch.empty(*experts, half // 8, outputs, dtype=torch.uint8)
    return GPUWeight(codes, torch.empty(*experts, 1, outputs), None, 2 * half, 32, group_scales)


def multiply_codes(num_rows: int, dtype: torch.dtype, blocks: bool = False) -> None:
    groups = 32 if blocks else 1
    codes, scales = torch.empty(14336, 4096, dtype=dtype), torch.empty(groups, 112 if blocks else 14336)
    x = torch.empty(num_rows, 4096, dtype=dtype)
    rows = QuantizedActivations(x, torch.empty(num_rows, groups), BF16, 128 if blocks else None)
    matmul(rows, GPUWeight(codes, scales, None, 4096, 128))


ROWS = (1, 16, 32, 64, 4096)  # one per way to launch


def sample(num_rows: int, vocab_size: int) -> None:
    mask_logits(torch.empty(num_rows, vocab_size), torch.empty(num_rows, -(-vocab_size // 32), dtype=torch.int32))
    draw(torch.empty(num_rows, vocab_size), torch.empty(num_rows, 5, dtype=torch.float64))


MIXTURES = {  # experts, experts per token, hidden channels, channels per expert
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen1.5-moe-a2.7b": (60, 4, 2048, 1408),
    "qwen3-30b": (128, 8, 2048, 768),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
}


def experts_of(num_experts: int, outputs: int, inputs: int, kind: str, dtype: torch.dtype) -> GPUWeight:
    if kind == "floats":
        return of_floats(torch.empty(num_experts, outputs, inputs, dtype=dtype))
    bits, code_dtype, group_size, has_zeros, _ = EXPERT_FORMATS[kind]
    codes = torch.empty(num_experts, outputs, inputs * bits // 8, dtype=torch.uint8 if bits == 4 else code_dtype)
    if kind == "nvfp4":
        return nvfp4(codes)
    groups = -(-inputs // (group_size or inputs))
    scales = torch.empty(num_experts, groups, -(-outputs // 128) if kind == "fp8 blocks" else outputs)
    scales = scales.to(torch.uint8) if kind == "mxfp4" else scales
    zeros = torch.empty(scales.shape, dtype=torch.int8) if has_zeros else None
    return GPUWeight(codes, scales, zeros, inputs, group_size or 128)


def mix(num_tokens: int, model: str, kind: str, dtype: torch.dtype = BF16) -> None:
    num_experts, per_token, size, channels = MIXTURES[model]
    gate_up = experts_of(2 * num_experts, channels, size, kind, dtype)
    down = experts_of(num_experts, size, channels, kind, dtype)
    rows = None if kind == "floats" else EXPERT_FORMATS[kind][-1]
    weights, chosen = route(torch.empty(num_tokens, num_experts, dtype=dtype), per_token, True)
    mixture(torch.empty(num_tokens, size, dtype=dtype), gate_up, down, weights, chosen, rows, rows)


def add_adapters(num_rows: int, max_rank: int, dtype: torch.dtype = BF16) -> None:
    """Add eight adapters to the matrices that read the input of an 8B model's feed-forward layer, and to those that
    write its output."""
    for inputs, outputs in ((4096, 14336), (14336, 4096)):
        table = AdapterTable.empty(8, max_rank, inputs, outputs, dtype, torch.get_default_device())
        slots = torch.zeros(num_rows, dtype=torch.int64)
        lora_add(torch.empty(num_rows, outputs, dtype=dtype), torch.empty(num_rows, inputs, dtype=dtype), table, slots)


CASES: dict[str, Callable[[], None]] = {
    **{f"attention decode 1 {model}": partial(attend, model, 1, 1) for model in MODELS},
    **{f"attention decode 64 {kind}": partial(attend, "llama-3.1-8b", 64, 64, kind) for kind in NAMES},
    **{f"attention prefill {model}": partial(attend, model, 4096, 1) for model in MODELS},
    **{f"attention prefill {kind}": partial(attend, "llama-3.1-8b", 4096, 2, kind) for kind in NAMES if kind != "none"},
    "attention decode float32": partial(attend, "llama-3.1-8b", 4, 4, dtype=torch.float32),
    "attention prefill float32": partial(attend, "llama-3.1-8b", 512, 4, dtype=torch.float32),
    "attention alibi": lambda: attend("baichuan-13b", 512, 4, alibi_slopes=torch.empty(40)),
    "attention sinks": lambda: attend("gpt-oss-20b", 512, 4, window=128, sinks=torch.empty(64)),
    "attention sinks decode": lambda: attend("gpt-oss-20b", 1, 1, sinks=torch.empty(64)),
    "attention window and cap": partial(attend, "gemma-2-9b", 512, 4, window=4096, soft_cap=50.0),
    "attention prefix": lambda: attend(
        "llama-3.1-8b", 64, 4, prefix_lengths=torch.zeros(4, dtype=torch.int64), chunk=8192
    ),
    "attention latent decode": partial(attend_latent, 64, 64),
    "attention latent prefill": partial(attend_latent, 4096, 1),
    **{f"kv_store {kind}": partial(store, kind) for kind in NAMES},
    "kv_store gemma-2-9b": partial(store, "none", "gemma-2-9b"),
    "rows": rows,
    **{f"matmul {rows} w8a16": partial(multiply, rows, 8, 1) for rows in ROWS},
    **{f"matmul {rows} w4a16 g128": partial(multiply, rows, 4, 32) for rows in ROWS},
    **{f"matmul {rows} w4a16 g32 zero": partial(multiply, rows, 4, 128, True) for rows in ROWS},
    **{f"matmul {rows} mxfp4": partial(multiply, rows, 4, 128, scale_dtype=torch.uint8) for rows in ROWS},
    **{f"matmul {rows} nvfp4": partial(multiply_nvfp4, rows) for rows in ROWS},
    **{f"matmul {rows} fp8 weight": partial(multiply, rows, 8, 1, dtype=FP8) for rows in ROWS},
    **{f"matmul {rows} w8a8": partial(multiply_codes, rows, torch.int8) for rows in ROWS},
    **{f"matmul {rows} fp8": partial(multiply_codes, rows, FP8) for rows in ROWS},
    **{f"matmul {rows} fp8 blocks": partial(multiply_codes, rows, FP8, True) for rows in ROWS},
    "sampling 128 llama-3": partial(sample, 128, 128256),
    "sampling 1 llama-2": partial(sample, 1, 32000),
    **{f"lora {rows} rank {rank}": partial(add_adapters, rows, rank) for rows, rank in ((1, 16), (64, 64), (4096, 16))},
    "lora 64 float32": partial(add_adapters, 64, 16, torch.float32),
    **{
        f"moe {tokens} mixtral-8x7b {kind}": partial(mix, tokens, "mixtral-8x7b", kind)
        for kind in ("floats", *EXPERT_FORMATS)
        for tokens in (1, 8, 128, 4096)
    },
    **{
        f"moe {tokens} {model} w4a16 g128": partial(mix, tokens, model, "w4a16 g128")
        for tokens in (1, 64, 4096)
        for model in MIXTURES
        if model != "mixtral-8x7b"
    },
    **{
        f"moe 8 mixtral-8x7b {kind} float32": partial(mix, 8, "mixtral-8x7b", kind, torch.float32)
        for kind in ("floats", "w8a16", "w4a16 g128", "w8a8", "fp8")
    },
}

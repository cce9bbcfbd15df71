"""Launches of every kernel in the shapes of real models, one for each class that is compiled differently. On the default device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.kv_format import FORMATS, allocate
from kernels.kv_store.triton import kv_store
from kernels.moe.triton import mixture
from kernels.paged_attention.triton import paged_attention
from kernels.quant_matmul.gpu_weight import GPUWeight
from kernels.quant_matmul.triton import quant_matmul, quant_matmul_codes, quantize_rows
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from kernels.rope.triton import rope
from kernels.sampling.triton import draw
from kernels.swiglu.triton import swiglu
from tests.kernels.cache_formats import NAMES, formats_of

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

MODELS = {  # query heads, key/value heads, channels
    "llama-3.1-8b": (32, 8, 128),
    "qwen2.5-1.5b": (12, 2, 128),
    "baichuan-13b": (40, 40, 128),
    "bloom-3b": (32, 32, 80),
    "gemma-2-9b": (16, 8, 256),
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
    """DeepSeek-V2-Lite: keys of 512 + 64 channels, whose first 512 are the values."""
    ints = partial(torch.zeros, dtype=torch.int64)
    keys = allocate(FORMATS["none"][0], (1024, 16, 1), 576, BF16, torch.get_default_device())
    values = type(keys)(keys.tensors, keys.format, 512, keys.dtype)
    query = torch.empty(num_tokens, 16, 576, dtype=BF16)
    tables = ints(num_sequences, 512)
    paged_attention(query, keys, values, tables, ints(num_sequences + 1), ints(num_sequences), 576**-0.5)


def store(kv_cache: str) -> None:
    device = torch.get_default_device()
    caches = [allocate(format, (1024, 16, 8), 128, BF16, device) for format in formats_of(kv_cache, 8, str(device))]
    key, value = torch.empty(2, 64, 8, 128, dtype=BF16)
    kv_store(key, value, *caches, torch.zeros(64, dtype=torch.int64))


def rows() -> None:
    x = torch.empty(64, 4096, dtype=BF16)
    rms_norm(x, x[0], 1e-5)
    add_rms_norm(x, x, x[0], 1e-5)
    rms_norm(torch.empty(64, 32, 128, dtype=BF16), x[0, :128], 1e-5)
    swiglu(torch.empty(64, 14336, dtype=BF16), torch.empty(64, 14336, dtype=BF16))
    angles = torch.empty(64, 64, dtype=BF16)
    for interleaved in (False, True):
        rope(torch.empty(64, 32, 128, dtype=BF16), angles, angles, interleaved)
    quantize_rows(x)
    quantize_rows(x, FP8)
    quantize_rows(x, FP8, 128)


def multiply(
    num_rows: int,
    bits: int,
    groups: int,
    zero_points: bool = False,
    inputs: int = 4096,
    outputs: int = 14336,
    dtype: torch.dtype = torch.int8,
) -> None:
    codes = torch.empty(outputs, inputs * bits // 8, dtype=torch.uint8 if bits == 4 else dtype)
    zeros = torch.empty(groups, outputs, dtype=torch.int8) if zero_points else None
    chunk = 128 if groups == 1 else inputs // groups
    quant_matmul(
        torch.empty(num_rows, inputs, dtype=BF16), GPUWeight(codes, torch.empty(groups, outputs), zeros, inputs, chunk)
    )


def multiply_codes(num_rows: int, dtype: torch.dtype, blocks: bool = False) -> None:
    groups = 32 if blocks else 1
    codes, scales = torch.empty(14336, 4096, dtype=dtype), torch.empty(groups, 112 if blocks else 14336)
    x = torch.empty(num_rows, 4096, dtype=dtype)
    quant_matmul_codes(
        x, torch.empty(num_rows, groups), GPUWeight(codes, scales, None, 4096, 128), BF16, 128 if blocks else None
    )


ROWS = (1, 16, 32, 64, 4096)  # one for each way to launch


def sample(num_rows: int, vocab_size: int) -> None:
    draw(torch.empty(num_rows, vocab_size), torch.empty(num_rows, 5, dtype=torch.float64))


def mix(num_tokens: int, num_experts: int, per_token: int, size: int, channels: int, quantised: bool = False) -> None:
    dtype = torch.int8 if quantised else BF16
    gate_up, down = (
        torch.empty(num_experts, 2 * channels, size, dtype=dtype),
        torch.empty(num_experts, size, channels, dtype=dtype),
    )
    scales = (torch.empty(gate_up.shape[:2]), torch.empty(down.shape[:2])) if quantised else ()
    chosen = torch.zeros(num_tokens, per_token, dtype=torch.int64)
    mixture(torch.empty(num_tokens, size, dtype=BF16), gate_up, down, chosen.float(), chosen, *scales)


CASES: dict[str, Callable[[], None]] = {
    **{f"attention decode 1 {model}": partial(attend, model, 1, 1) for model in MODELS},
    **{f"attention decode 64 {kind}": partial(attend, "llama-3.1-8b", 64, 64, kind) for kind in NAMES},
    **{f"attention prefill {model}": partial(attend, model, 4096, 1) for model in MODELS},
    **{f"attention prefill {kind}": partial(attend, "llama-3.1-8b", 4096, 2, kind) for kind in NAMES if kind != "none"},
    "attention decode float32": partial(attend, "llama-3.1-8b", 4, 4, dtype=torch.float32),
    "attention prefill float32": partial(attend, "llama-3.1-8b", 512, 4, dtype=torch.float32),
    "attention alibi": lambda: attend("baichuan-13b", 512, 4, alibi_slopes=torch.empty(40)),
    "attention window and cap": partial(attend, "gemma-2-9b", 512, 4, window=4096, soft_cap=50.0),
    "attention prefix": lambda: attend("llama-3.1-8b", 64, 4, prefix_lengths=torch.zeros(4, dtype=torch.int64)),
    "attention latent decode": partial(attend_latent, 64, 64),
    "attention latent prefill": partial(attend_latent, 4096, 1),
    **{f"kv_store {kind}": partial(store, kind) for kind in NAMES},
    "rows": rows,
    **{f"matmul {rows} w8a16": partial(multiply, rows, 8, 1) for rows in ROWS},
    **{f"matmul {rows} w4a16 g128": partial(multiply, rows, 4, 32) for rows in ROWS},
    **{f"matmul {rows} w4a16 g32 zero": partial(multiply, rows, 4, 128, True) for rows in ROWS},
    **{f"matmul {rows} fp8 weight": partial(multiply, rows, 8, 1, dtype=FP8) for rows in ROWS},
    **{f"matmul {rows} w8a8": partial(multiply_codes, rows, torch.int8) for rows in ROWS},
    **{f"matmul {rows} fp8": partial(multiply_codes, rows, FP8) for rows in ROWS},
    **{f"matmul {rows} fp8 blocks": partial(multiply_codes, rows, FP8, True) for rows in ROWS},
    "sampling 128 llama-3": partial(sample, 128, 128256),
    "sampling 1 llama-2": partial(sample, 1, 32000),
    **{f"moe {tokens} mixtral": partial(mix, tokens, 8, 2, 4096, 14336) for tokens in (1, 128, 4096)},
    "moe 1 mixtral int8": partial(mix, 1, 8, 2, 4096, 14336, True),
    "moe 4096 mixtral int8": partial(mix, 4096, 8, 2, 4096, 14336, True),
    "moe 64 qwen3-30b": partial(mix, 64, 128, 8, 2048, 768),
}

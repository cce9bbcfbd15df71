"""Measurements of tests/bench/gpu.py: kernels in the sizes of real models, and whole models with random weights.

Kernel times are medians of CUDA events around replays of a graph. The graph contains several launches, each with its
own inputs, so that inputs are not read from the cache.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.supervise import Row

REPLAYS = 30
L2_BYTES = 60e6
BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
"""Outputs and inputs of Llama-3.1-8B's products as the engine fuses them on a GPU: q, k and v; o; gate and up; down."""

Step = tuple[Callable[[], Any], float]
"""A launch over its own inputs, and the minimum number of bytes or operations that it needs."""


def median_seconds(steps: list[Step]) -> float:
    """Return the median seconds of a step. All steps are captured into one graph, which is replayed."""
    for run, _ in steps:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run, _ in steps:
            run()
    times = []
    for replay in range(REPLAYS + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 5:
            times.append(start.elapsed_time(end) / 1000 / len(steps))
    return statistics.median(times)


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    if dtype in (INT8, torch.uint8):
        low, high = (-127, 128) if dtype == INT8 else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype, device="cuda")
    return torch.randn(shape, device="cuda", dtype=torch.float32 if dtype == torch.float32 else BF16).to(dtype)


def rotated(make: Callable[[], Step], nbytes: float) -> list[Step]:
    """Return so many sets of inputs that each has left the cache before its next use."""
    return [make() for _ in range(max(4, int(3 * L2_BYTES / nbytes)))][:64]


def copy() -> list[Step]:
    size = 2**31
    source, target = random(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device="cuda")
    return [(lambda: target.copy_(source), 2.0 * size)]


def large_product(dtype: torch.dtype) -> list[Step]:
    size = 8192
    a, b = random(size, size, dtype=dtype), random(size, size, dtype=dtype)
    one = torch.ones((), device="cuda")
    if dtype == FP8:
        return [(lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=BF16), 2.0 * size**3)]
    return [(lambda: a @ b.T, 2.0 * size**3)]


def product(kind: str, rows: int, outputs: int, inputs: int) -> Step:
    """Measure a product: in bytes of the weight for one row, else in operations."""
    from kernels.linear import gpu_weight, triton
    from kernels.quantize_rows import QuantizedActivations
    from kernels.quantize_rows.triton import quantize_rows

    bits = {"bf16": 16, "int4 g128": 4}.get(kind, 8)
    counted = outputs * inputs * bits / 8 if rows <= 64 else 2.0 * rows * outputs * inputs
    x = random(rows, inputs)
    if kind == "bf16":
        matrix = random(outputs, inputs)
        return lambda: x @ matrix.T, counted
    codes = random(outputs, inputs * bits // 8, dtype={"int4 g128": torch.uint8, "fp8": FP8}.get(kind, INT8))
    scales = torch.rand(inputs // 128 if bits == 4 else 1, outputs, device="cuda")
    if bits == 4:
        counted += scales.nbytes if rows <= 64 else 0
    weight = gpu_weight.GPUWeight(codes, scales, None, inputs, 128)
    if kind in ("int8", "int4 g128"):
        return lambda: triton.matmul(x, weight), counted
    x_codes, x_scales = quantize_rows(x, codes.dtype)
    return lambda: triton.matmul(QuantizedActivations(x_codes, x_scales, BF16), weight), counted


def products_of_a_layer(kind: str, rows: int) -> list[Step]:
    """Measure the products of at least two layers, so that a weight has left the cache before its next use."""
    return [product(kind, rows, *shape) for _ in range(2 if rows > 64 else 4) for shape in LLAMA]


def attention(kv_cache: str, sequences: int, context: int = 8192) -> list[Step]:
    """Measure decode attention with 32 query heads and 8 key/value heads of 128 channels."""
    from kernels.kv_format import FORMATS, allocate
    from kernels.kv_store.triton import kv_store
    from kernels.paged_attention.triton import paged_attention

    blocks, tokens = sequences * context // 16, sequences * context

    def make() -> Step:
        caches = [allocate(part, (blocks, 16, 8), 128, BF16, torch.device("cuda")) for part in FORMATS[kv_cache]]
        for first in range(0, tokens, 65536):
            slots = torch.arange(first, min(first + 65536, tokens), device="cuda")
            kv_store(random(len(slots), 8, 128), random(len(slots), 8, 128), *caches, slots)
        tables = torch.randperm(blocks, device="cuda").view(sequences, -1)
        starts, lengths = torch.arange(sequences + 1, device="cuda"), torch.full((sequences,), context, device="cuda")
        query = random(sequences, 32, 128)
        used = sum(part.nbytes for cache in caches for part in cache.tensors)
        return lambda: paged_attention(query, caches[0], caches[1], tables, starts, lengths, 128**-0.5), used

    return rotated(make, tokens * 8 * 128 * 2)[: 2 if sequences > 1 else None]


def mixture(kind: str, tokens: int) -> list[Step]:
    """Measure Mixtral-8x7B's mixture in bytes of the chosen experts: two for one token, all for many tokens."""
    from kernels.linear import gpu_weight
    from kernels.moe.triton import mixture as run
    from kernels.quantize_rows import ActivationFormat

    def experts(count: int, outputs: int, inputs: int) -> gpu_weight.GPUWeight:
        if kind == "bf16":
            return gpu_weight.of_floats(random(count, outputs, inputs))
        if kind == "int4 g128":
            scales = torch.rand(count, inputs // 128, outputs, device="cuda")
            return gpu_weight.GPUWeight(
                random(count, outputs, inputs // 2, dtype=torch.uint8), scales, None, inputs, 128
            )
        codes = random(count, outputs, inputs, dtype=FP8 if kind == "fp8" else INT8)
        return gpu_weight.GPUWeight(codes, torch.rand(count, 1, outputs, device="cuda"), None, inputs, 128)

    gate_up, down = experts(16, 14336, 4096), experts(8, 4096, 14336)
    rows = {"a8w8": ActivationFormat(INT8), "fp8": ActivationFormat(FP8)}.get(kind)
    nbytes = sum(part.nbytes for weight in (gate_up, down) for part in weight.tensors.values())

    def step(first: int) -> Step:
        chosen = (torch.arange(2 * tokens, device="cuda").view(tokens, 2) + first) % 8
        x, weights = random(tokens, 4096), torch.full((tokens, 2), 0.5, device="cuda")
        counted = nbytes * min(2 * tokens, 8) / 8 if tokens <= 64 else 2.0 * 2 * tokens * 3 * 14336 * 4096
        return lambda: run(x, gate_up, down, weights, chosen, rows, rows), counted

    return [step(first) for first in (0, 2, 4, 6)]


def top_p(sorting: bool, rows: int = 128, vocab_size: int = 128256) -> list[Step]:
    """Measure top-p in bytes of the logits, which are read once."""
    from kernels.sampling.triton import draw

    settings = torch.tensor([1, 0, 0.9, 0, 0.5], dtype=torch.float64, device="cuda").expand(rows, -1).contiguous()

    def make() -> Step:
        logits = 3 * random(rows, vocab_size, dtype=torch.float32)
        if sorting:
            return lambda: logits.sort(dim=-1, descending=True), logits.nbytes
        return lambda: draw(logits, settings), logits.nbytes

    return rotated(make, 4.0 * rows * vocab_size)


CONFIGS = {
    "8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
    "1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def engine(size: str, scheme: str, rows: int, kv_cache: str = "none", **options: Any) -> Any:
    """Return an engine with random weights."""
    from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
    from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Weights
    from pipelines.loading.load_engine import load_engine

    activations = Activations.dynamic if scheme in ("a8w8", "fp8") else Activations.none
    group_size = 128 if scheme == "int4" else -1
    quant = QuantConfig(
        QuantScheme[scheme], group_size=group_size, activations=activations, kv_cache=KVCacheFormat[kv_cache]
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[size]))
        model = ModelConfig(folder, dtype=DType.bfloat16, weights=Weights.random, tokenizer=None)
        return load_engine(RunConfig(model=model, device=DeviceConfig(DeviceType.cuda, **options), quant=quant), rows)


def decode_step(size: str, scheme: str, rows: int) -> Row:
    """Measure the median seconds per decode step of a whole model after 128 tokens, and the bytes that a step reads."""
    from conf.decoding import DecodeConfig

    model_engine = engine(size, scheme, rows)
    decode = DecodeConfig(max_new_tokens=129, ignore_eos=True, prefix_cache=False)
    groups = [model_engine.add(model_engine.request(i, [5 + i] * 128, decode)) for i in range(rows)]
    times = []
    while any(group.sequences for group in groups):
        model_engine.step()
        times.append(time.perf_counter())
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times[8:]))
    return timed(
        seconds, model_engine.executor.step_weight_bytes(rows) + rows * 192 * model_engine.executor.kv_bytes_per_token
    )


def prompt(scheme: str, num_tokens: int = 4096) -> Row:
    """Measure the 8B model's step for a whole prompt, in operations of its linear layers."""
    from conf.decoding import DecodeConfig

    model_engine = engine("8B", scheme, 1, max_batched_tokens=num_tokens)
    decode, times = DecodeConfig(max_new_tokens=1, ignore_eos=True, prefix_cache=False), []
    for i in range(6):
        model_engine.add(model_engine.request(i, [5 + i] * num_tokens, decode))
        start = time.perf_counter()
        model_engine.step()
        times.append(time.perf_counter() - start)
    layer = sum(outputs * inputs for outputs, inputs in LLAMA)
    return timed(statistics.median(times[1:]), 2.0 * num_tokens * 32 * layer)


def offline(scheme: str, kv_cache: str, lengths: list[tuple[int, int]], num_requests: int, seconds: float) -> Row:
    """Measure generated tokens of the 8B model: greedy, all requests submitted at once, within a time limit in seconds.

    `lengths`: prompt and output lengths, in turn.
    """
    from conf.decoding import DecodeConfig

    model_engine = engine("8B", scheme, 256, kv_cache, max_batched_tokens=8192)
    requests = (
        model_engine.request(
            i, [5 + i % 1000] * old, DecodeConfig(max_new_tokens=new, ignore_eos=True, prefix_cache=False)
        )
        for i, (old, new) in enumerate(itertools.islice(itertools.cycle(lengths), num_requests))
    )
    start = time.perf_counter()
    groups = [model_engine.add(request) for request in requests]
    while any(group.sequences for group in groups) and time.perf_counter() - start < seconds:
        model_engine.step()
    return timed(time.perf_counter() - start, model_engine.num_generated_tokens)


def transformers_step(size: str = "8B") -> Row:
    """Measure a decode step of transformers' model in bfloat16 with a static cache, compiled: bytes of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIGS[size].items() if k != "model_type"}))
        tokens = torch.full((1, 128), 5)
    run = partial(
        model.to(BF16).eval().generate,
        do_sample=False,
        cache_implementation="static",
        eos_token_id=None,
        pad_token_id=0,
    )
    times = {}
    for new in (33, 33, 161):  # the first call compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(tokens, max_new_tokens=new)
        torch.cuda.synchronize()
        times[new] = time.perf_counter() - start
    return timed((times[161] - times[33]) / 128, sum(p.nbytes for p in model.parameters()))


def timed(seconds: float, counted: float) -> Row:
    return {"seconds": seconds, "per_s": counted / seconds}


SPEC_BENCH = [(n, 256) for n in (11, 20, 30, 41, 53, 78, 474, 720, 786, 1200)]  # deciles of the prompts' token counts
DECODE: list[tuple[str, str, float | None, Callable[[], Row]]] = [
    *(
        (f"decode step of {size}, batch {rows}, {'bf16' if scheme == 'none' else scheme}", "copy", goal, step)
        for size, scheme, rows, goal in (
            ("8B", "none", 1, 0.78),
            ("8B", "int4", 1, 0.50),
            ("8B", "int8", 1, 0.65),
            ("1.5B", "none", 1, 0.60),
            ("8B", "a8w8", 32, None),
            ("8B", "fp8", 32, None),
        )
        for step in [partial(decode_step, size, scheme, rows)]
    ),
]
WHOLE: list[tuple[str, str, float | None, Callable[[], Row]]] = [
    ("offline 8B, Spec-Bench lengths, bf16", "tokens", 14000, partial(offline, "none", "none", SPEC_BENCH, 1000, 40)),
    (
        "offline 8B, 128 in, 2048 out, fp8, KV fp8",
        "tokens",
        18000,
        partial(offline, "fp8", "fp8", [(128, 2048)], 512, 40),
    ),
    ("prompt of 4096 tokens, 8B, bf16", "bf16", 0.6, partial(prompt, "none")),
    ("prompt of 4096 tokens, 8B, a8w8", "int8", 0.45, partial(prompt, "a8w8")),
    ("prompt of 4096 tokens, 8B, fp8", "fp8", 0.45, partial(prompt, "fp8")),
    ("decode step of 8B, batch 1, bf16, transformers compiled", "copy", None, transformers_step),
]

PLAN: list[tuple[str, str, float | None, Callable[[], list[Step]]]] = [
    # name, unit of the share, goal of the share, steps
    *(
        (f"products of a decode step, 8B, 1 row, {kind}", "copy", goal, partial(products_of_a_layer, kind, 1))
        for kind, goal in (("bf16", 0.78), ("int8", 0.65), ("int4 g128", 0.50))
    ),
    *(
        (f"products of a decode step, 8B, 32 rows, {kind}", "copy", None, partial(products_of_a_layer, kind, 32))
        for kind in ("bf16", "int8", "int4 g128", "a8w8", "fp8")
    ),
    *(
        (f"products of prefill, 8B, 4096 rows, {kind}", rate, goal, partial(products_of_a_layer, kind, 4096))
        for kind, rate, goal in (("bf16", "bf16", 0.6), ("a8w8", "int8", 0.45), ("fp8", "fp8", 0.45))
    ),
    *(
        (f"attention decode, 8k context, batch {batch}, {kind}", "copy", 0.7, partial(attention, kind, batch))
        for batch in (1, 64)
        for kind in ("none", "int8", "fp8", "int4")
    ),
    *(
        (f"experts of Mixtral-8x7B, {tokens} tokens, {kind}", "copy", None, partial(mixture, kind, tokens))
        for tokens in (1, 32)
        for kind in ("bf16", "int8", "int4 g128", "a8w8", "fp8")
    ),
    *(
        (f"experts of Mixtral-8x7B, 4096 tokens, {kind}", rate, None, partial(mixture, kind, 4096))
        for kind, rate in (("bf16", "bf16"), ("int4 g128", "bf16"), ("a8w8", "int8"), ("fp8", "fp8"))
    ),
    ("exact top-p, batch 128, vocabulary 128k", "sort", 4.0, partial(top_p, False)),
]


CEILINGS: dict[str, Callable[[], list[Step]]] = {
    "copy": copy,
    "bf16": partial(large_product, BF16),
    "fp8": partial(large_product, FP8),
    "sort": partial(top_p, True),
}


def rows() -> dict[str, tuple[str, float | None, Callable[[], Row]]]:
    """Return the measurements by name, with the unit of a row's share and its goal. Rows that give the most information
    per second come first."""
    kernels = [(name, of, goal, partial(time_of_a_step, make)) for name, of, goal, make in PLAN]
    ceilings = [(name, name, None, partial(time_of_a_step, make)) for name, make in CEILINGS.items()]
    aimed, others = ([row for row in (*DECODE, *kernels) if (row[2] is not None) == has] for has in (True, False))
    return {name: (of, goal, run) for name, of, goal, run in (*ceilings, *aimed, *WHOLE, *others)}


def time_of_a_step(make: Callable[[], list[Step]]) -> Row:
    steps = make()
    return timed(median_seconds(steps), sum(counted for _, counted in steps) / len(steps))


def limit_s(name: str) -> float:
    """Return the time limit of a row: a kernel, or a model with its weights."""
    return 100.0 if name in {row[0] for row in (*DECODE, *WHOLE)} else 40.0

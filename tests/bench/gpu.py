"""Checks the kernels on a GPU, then times them: `python tests/bench/gpu.py [--plan]`. Made to need less than 8 minutes on an H200.

Needs torch, triton, transformers, safetensors, numpy and pytest; whole models also gguf, sentencepiece and tiktoken. Writes
results/gpu.json and results/gpu.md beside itself, with the GPU, the versions and the date, and beside each time what the same GPU
reached in the same run: bytes per second of a copy, operations per second of a large product. Times of kernels are medians of CUDA
events around replays of a graph of several launches, each with its own inputs, so that these do not come from the cache.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

RESULTS = Path(__file__).parent / "results"
REPLAYS = 30
L2_BYTES = 60e6
BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}  # Llama-3.1-8B: N, K

Row = dict[str, Any]
Step = tuple[Callable[[], Any], float]
"""A launch over inputs of its own, and the bytes or operations that it needs at least."""


def median_seconds(steps: list[Step]) -> float:
    """Of one step. All are captured into one graph, which is replayed."""
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
    """Enough sets of inputs that each has left the cache before it comes again."""
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
    """Counted as bytes of the weight for one row, else as operations."""
    from kernels.quant_matmul import gpu_weight, triton

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
        return lambda: triton.quant_matmul(x, weight), counted
    x_codes, x_scales = triton.quantize_rows(x, codes.dtype)
    return lambda: triton.quant_matmul_codes(x_codes, x_scales, weight, BF16), counted


def products_of_a_layer(kind: str, rows: int) -> list[Step]:
    """Two layers at least, so that the weights of one have left the cache when its turn comes."""
    return [product(kind, rows, *shape) for _ in range(2 if rows > 64 else 4) for shape in LLAMA.values()]


def attention(kv_cache: str, sequences: int, context: int = 8192) -> list[Step]:
    """Decode with 32 query heads and 8 key/value heads of 128 channels."""
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
    """Mixtral-8x7B. Counts the bytes of the experts that are chosen: of one token two, of many all."""
    from kernels.moe.triton import mixture as run
    from kernels.quant_matmul import gpu_weight

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
    rows = {"a8w8": gpu_weight.RowCodes(INT8), "fp8": gpu_weight.RowCodes(FP8)}.get(kind)
    nbytes = sum(part.nbytes for weight in (gate_up, down) for part in weight.tensors.values())

    def step(first: int) -> Step:
        chosen = (torch.arange(2 * tokens, device="cuda").view(tokens, 2) + first) % 8
        x, weights = random(tokens, 4096), torch.full((tokens, 2), 0.5, device="cuda")
        counted = nbytes * min(2 * tokens, 8) / 8 if tokens <= 64 else 2.0 * 2 * tokens * 3 * 14336 * 4096
        return lambda: run(x, gate_up, down, weights, chosen, rows, rows), counted

    return [step(first) for first in (0, 2, 4, 6)]


def top_p(sorting: bool, rows: int = 128, vocab_size: int = 128256) -> list[Step]:
    """The logits' bytes, read once."""
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
MODELS = [  # size, scheme, rows, goal of the share of the copy bandwidth
    ("8B", "none", 1, 0.78),
    ("8B", "int8", 1, 0.65),
    ("8B", "int4", 1, 0.50),
    ("8B", "a8w8", 32, None),
    ("8B", "fp8", 32, None),
    ("1.5B", "none", 1, 0.60),
]


def decode_step(size: str, scheme: str, rows: int) -> tuple[float, float]:
    """Of a whole model with random weights, in the engine, after 128 tokens: median seconds from step to step, and the bytes it reads."""
    from conf.decoding import DecodeConfig
    from conf.quantization import Activations, QuantConfig, QuantScheme
    from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Weights
    from pipelines.assembly import assemble

    activations = Activations.dynamic if scheme in ("a8w8", "fp8") else Activations.none
    quant = QuantConfig(QuantScheme[scheme], group_size=128 if scheme == "int4" else -1, activations=activations)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[size]))
        model = ModelConfig(folder, DType.bfloat16, Weights.random, tokenizer=None)
        engine = assemble(RunConfig(model=model, device=DeviceConfig(DeviceType.cuda), quant=quant), rows)
    decode = DecodeConfig(max_new_tokens=129, ignore_eos=True, prefix_cache=False)
    groups = [engine.add(engine.request(i, [5 + i] * 128, decode)) for i in range(rows)]
    times = []
    while any(group.sequences for group in groups):
        engine.step()
        times.append(time.perf_counter())
    seconds = statistics.median(after - before for before, after in itertools.pairwise(times[8:]))
    return seconds, engine.runner.step_weight_bytes(rows) + rows * 192 * engine.runner.kv_bytes_per_token


PLAN: list[tuple[str, str, float | None, Callable[[], list[Step]]]] = [
    # name, what its share is of, goal of the share, steps
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
    ("exact top-p, batch 128, vocabulary 128k", "copy", None, partial(top_p, False)),
    ("torch.sort, batch 128, vocabulary 128k", "copy", None, partial(top_p, True)),
]


def check() -> None:
    """tests/gpu, in a process of its own, without tests/conftest.py, which needs more packages. Ends the program where a test fails."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-x", "--confcutdir=tests/gpu"]
    if subprocess.run(command, cwd=REPOSITORY).returncode:
        sys.exit("tests/gpu fails: kernels that are not right are not timed")


def measure() -> dict[str, Any]:
    ceilings = {"copy": 0.0, "bf16": 0.0, "fp8": 0.0}
    for name, steps in (("copy", copy()), ("bf16", large_product(BF16)), ("fp8", large_product(FP8))):
        ceilings[name] = steps[0][1] / median_seconds(steps)
    ceilings["int8"] = 2 * ceilings["bf16"]
    rows: list[Row] = []
    for name, ceiling, goal, make in PLAN:
        steps = make()
        seconds = median_seconds(steps)
        per_s = sum(counted for _, counted in steps) / len(steps) / seconds
        share = per_s / ceilings[ceiling]
        rows.append({"name": name, "microseconds": 1e6 * seconds, "of": ceiling, "share": share, "goal": goal})
        print(f"{name}: {1e6 * seconds:.1f} us, {share:.0%} of {ceiling}", flush=True)
        del steps
        torch.cuda.empty_cache()
    for size, scheme, batch, goal in MODELS:
        seconds, counted = decode_step(size, scheme, batch)
        name = f"decode step of {size}, batch {batch}, {'bf16' if scheme == 'none' else scheme}"
        share = counted / seconds / ceilings["copy"]
        rows.append({"name": name, "microseconds": 1e6 * seconds, "of": "copy", "share": share, "goal": goal})
        print(f"{name}: {1e6 * seconds:.1f} us, {share:.0%} of copy", flush=True)
        torch.cuda.empty_cache()
    import triton

    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "ceilings_per_s": ceilings,
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    ceilings = result["ceilings_per_s"]
    lines = [
        f"{result['gpu']}, {result['date']}, torch {result['torch']}, triton {result['triton']}, CUDA {result['cuda']}. "
        "Measured in this run: "
        f"copy {ceilings['copy'] / 1e12:.2f} TB/s, bf16 {ceilings['bf16'] / 1e12:.0f} and fp8 {ceilings['fp8'] / 1e12:.0f} TFLOP/s; "
        "int8 counts as twice bf16.",
        "",
        "| | microseconds | share | of | goal |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        goal = "" if row["goal"] is None else f"{row['goal']:.0%}"
        lines.append(f"| {row['name']} | {row['microseconds']:.1f} | {row['share']:.1%} | {row['of']} | {goal} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print what would be timed, and end")
    args = parser.parse_args()
    if args.plan or not torch.cuda.is_available():
        print("\n".join(["tests/gpu", "copy bandwidth", "bf16 and fp8 rate", *(name for name, *_ in PLAN)]))
        sys.exit(None if args.plan else "there is no NVIDIA GPU that torch can use: nothing was measured")
    os.environ.pop("TRITON_INTERPRET", None)
    torch.manual_seed(0)
    check()
    result = measure()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "gpu.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()

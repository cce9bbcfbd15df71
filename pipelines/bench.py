"""`task=bench`: how fast the engine is, counted in real tokens, beside what the machine's memory could give.

With t(n) = seconds from submitting a batch of B prompts of P tokens until every row has n new tokens:
prefill = B * P / t(1), decode = B * (N - 1) / (t(N) - t(1)). Token ids are random, no beginnings are shared, lengths are exact; loading
and warm-up are outside.
"""

import json
import logging
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conf.schema import BenchConfig, DecodeConfig, RunConfig
from pipelines import report
from pipelines.engine import Engine
from pipelines.loading import load_engine

log = logging.getLogger(__name__)

BANDWIDTH_BYTES = 2**29  # far beyond any cache
LOW_SHARE = 0.3  # of the bandwidth; a decode step below it has a cause that can be put right


def run_bench(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Raises UserError, before anything is written, for a batch that the model does not take."""
    bench = run.bench
    with report.progress_bar() as progress:
        start = time.perf_counter()
        engine = load_engine(run, bench.batch_size, progress.loaded)
        load_s = time.perf_counter() - start
        for _ in range(bench.warmup):
            measure(engine, bench, seed=0)
        rounds = []
        for i in range(bench.repeats):
            rounds.append(measure(engine, bench, seed=i + 1))
            progress.generated(i + 1, bench.repeats, _rates(rounds, bench)["decode_tokens_per_s"] or 0.0)
    metrics = {
        **_rates(rounds, bench),
        "time_to_first_token_s": _percentiles([s for r in rounds for s in r.first_token_s]),
        "time_per_output_token_s": _percentiles([s for r in rounds for s in r.step_s]),
        "load_s": load_s,
        "peak_memory_bytes": report.peak_memory_bytes(engine.device),
        **_memory(engine, bench, rounds),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, bench, output_dir)


@dataclass(frozen=True)
class Round:
    """One batch from submission to its last token. Seconds."""

    first_token_s: list[float]  # per row
    step_s: list[float]  # of each step in which every row gets a token
    total_s: float


def measure(engine: Engine, bench: BenchConfig, seed: int) -> Round:
    """Submit a batch of random prompts and step until every row has all its tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = (bench.batch_size, bench.prompt_tokens)
    prompts = torch.randint(0, engine.vocab_size, size, generator=generator).tolist()
    decode = DecodeConfig(
        max_new_tokens=bench.new_tokens, min_new_tokens=bench.new_tokens, ignore_eos=True, prefix_cache=False
    )
    requests = [engine.request(i, prompt, decode) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    groups = [engine.add(request) for request in requests]
    first_token_s: dict[int, float] = {}
    step_s, before = [], start
    while any(group.sequences for group in groups):
        generating = len(first_token_s) == len(groups)
        engine.step()
        now = time.perf_counter()
        for i, group in enumerate(groups):
            if group.num_output_tokens:
                first_token_s.setdefault(i, now - start)
        if generating:
            step_s.append(now - before)
        before = now
    return Round(list(first_token_s.values()), step_s, before - start)


def read_bandwidth() -> float:
    """Bytes per second of a streaming read by all threads: the best of five sums over half a GiB."""
    data = torch.ones(BANDWIDTH_BYTES // 4)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return BANDWIDTH_BYTES / min(seconds[1:])


def _rates(rounds: list[Round], bench: BenchConfig) -> dict[str, float | None]:
    """Medians over the rounds."""
    first = [max(r.first_token_s) for r in rounds]
    decode = [
        bench.batch_size * (bench.new_tokens - 1) / (r.total_s - t1)
        for r, t1 in zip(rounds, first, strict=True)
        if r.step_s
    ]
    return {
        "prefill_tokens_per_s": statistics.median(bench.batch_size * bench.prompt_tokens / t1 for t1 in first),
        "decode_tokens_per_s": statistics.median(decode) if decode else None,
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


def _memory(engine: Engine, bench: BenchConfig, rounds: list[Round]) -> dict[str, Any]:
    """Bytes of weights and of the rows' keys and values, and how much of the bandwidth reading both in every step is."""
    kv_bytes = engine.runner.kv_bytes_per_token * bench.batch_size * (bench.prompt_tokens + bench.new_tokens // 2)
    steps = [s for r in rounds for s in r.step_s]
    bandwidth = read_bandwidth() if engine.device.type == "cpu" else None
    share = None
    if steps and bandwidth:
        share = (engine.runner.step_weight_bytes + kv_bytes) / statistics.median(steps) / bandwidth
        if share < LOW_SHARE:
            log.warning(
                "the decode step reaches %.0f %% of the memory bandwidth: reference kernels, more threads than cores (%d), "
                "another busy process, or a model so small that its loop is the work",
                100 * share,
                torch.get_num_threads(),
            )
    return {
        "weight_bytes": engine.runner.weight_bytes,
        "kv_bytes": kv_bytes,
        "read_bandwidth_bytes_per_s": bandwidth,
        "decode_share_of_bandwidth": share,
    }


def _print(metrics: dict[str, Any], bench: BenchConfig, output_dir: Path) -> None:
    def shown(name: str, unit: str, factor: float = 1.0) -> str:
        return "-" if metrics[name] is None else f"{metrics[name] * factor:,.1f} {unit}"

    report.print_table(
        [
            (
                "batch",
                f"{bench.batch_size} x ({bench.prompt_tokens} + {bench.new_tokens}) tokens, {bench.repeats} times",
            ),
            ("prefill", shown("prefill_tokens_per_s", "tokens/s")),
            ("decode", shown("decode_tokens_per_s", "tokens/s")),
            ("weights", shown("weight_bytes", "MB", 1e-6)),
            ("share of the bandwidth", shown("decode_share_of_bandwidth", "%", 100)),
        ]
    )
    print(f"output: {output_dir}")

"""`task=bench`: speed of the engine in tokens per second, and the share of the memory bandwidth that it reaches.

With t(n) = seconds from submitting a batch of B prompts of P tokens until every row has n of its N new tokens: prefill
= B * P / t(1), decode = B * (N - 1) / (t(N) - t(1)).

Prompts are random, or the rows of a file with their own lengths. The prefix cache is off, and the number of new tokens
is exact. Loading and warm-up are not counted. Tokens are chosen by the decode settings.
"""

import itertools
import json
import logging
import secrets
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.tasks import BenchConfig
from models.tokenizers import Tokenizer
from pipelines.engine import Engine, slot_cost
from pipelines.jobs import report
from pipelines.jobs.data_files import ROWS, DataFile, find_file
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import Lines, parse_row
from pipelines.loading.bandwidth import cache_bytes, memory_bandwidth, share_of_bandwidth
from pipelines.loading.load_engine import load_engine

log = logging.getLogger(__name__)

LOW_CAUSES = {
    "cpu": "reference kernels, more threads than cores, another busy process, or a model so small that its loop is the work",
    "cuda": "a decode step that is not captured, a cold GPU, or a model so small that its loop is the work",
}
MISSING = "is not a file: give a .jsonl, .csv or .json, or .gz of these, or leave it out for random prompts"
LOW_SHARE = 0.3  # share of the bandwidth; a slower decode step has a cause that the user can remove


def run_bench(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Measure and write the results.

    Raises UserError, before any file is written, for a batch that the model does not accept.
    """
    bench = run.bench
    decode = decode_config(run.decode, bench.new_tokens)
    if bench.data is not None:
        find_file("bench.data", bench.data, ROWS, MISSING)  # fails before anything is loaded
    with report.progress_bar() as progress:
        start = time.perf_counter()
        engine = load_engine(run, bench.batch_size, progress)
        load_s = time.perf_counter() - start
        run = replace(run, decode=_resolved(engine.requests.resolve(run.decode)))
        decode = replace(decode, seed=run.decode.seed)
        prompts = prompt_batches(bench, engine)
        for _ in range(bench.warmup):
            measure(engine, next(prompts), decode)
        rounds, drafts = [], engine.speculator.counts
        for i in range(bench.repeats):
            rounds.append(measure(engine, next(prompts), decode))
            progress.generated(i + 1, bench.repeats, rates(rounds, bench)["decode_tokens_per_s"] or 0.0)
    metrics = {
        **rates(rounds, bench),
        "time_to_first_token_s": _percentiles([s for r in rounds for s in r.first_token_s]),
        "time_per_output_token_s": _percentiles([s for r in rounds for s in r.token_s]),
        **report.draft_metrics(engine.speculator.counts.since(drafts)),
        "seed": run.decode.seed,
        "start_s": report.START_S,
        "load_s": load_s,
        "peak_memory_bytes": report.peak_memory_of(engine),
        **_memory(engine, bench, rounds),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, bench, output_dir)


def decode_config(decode: DecodeConfig, size: int) -> DecodeConfig:
    """Return the decode settings of answers of `size` tokens.

    Raises UserError for lengths and stops, which a bench sets itself.
    """
    for name in ("max_new_tokens", "min_new_tokens", "max_length", "stop", "stop_token_ids"):
        if value := getattr(decode, name):
            raise UserError(
                f"decode.{name}={value} is not used by task=bench: leave it out, bench.new_tokens is the length"
            )
    if decode.n > 1:
        raise UserError(
            f"decode.n={decode.n} is not used by task=bench: leave it out, bench.batch_size is the number of rows"
        )
    speculation, speculate = decode.speculation, decode.speculate
    alone = replace(speculation, shared=False)
    # If `shared` has no effect with this `speculate`, setting it would only cause a warning.
    if len(alone.unused(speculate)) == len(speculation.unused(speculate)):
        speculation = alone
    return replace(
        decode,
        max_new_tokens=size,
        min_new_tokens=size,
        ignore_eos=True,
        prefix_cache=False,
        speculation=speculation,
    )


def _resolved(decode: DecodeConfig) -> DecodeConfig:
    """Return the decode settings for config.yaml that repeat the run: no lengths, a seed if tokens are sampled."""
    seed = secrets.randbits(32) if decode.temperature and decode.seed is None else decode.seed
    return replace(decode, seed=seed, max_new_tokens=None, min_new_tokens=None, max_length=None)


def prompt_batches(bench: BenchConfig, engine: Engine) -> Iterator[list[list[int]]]:
    """Yield a batch of token ids for each round: random ids, or the rows of the file in a cycle."""
    if bench.data is not None:
        rows = itertools.cycle(_replayed(find_file("bench.data", bench.data, ROWS, MISSING), engine.tokenizer))
        while True:
            yield list(itertools.islice(rows, bench.batch_size))
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(0, engine.vocab_size, (bench.batch_size, bench.prompt_tokens), generator=generator).tolist()


def _replayed(file: DataFile, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of a file's rows: rows of task=predict, or rows with `turns`, whose first turn is used."""
    encoder = PromptEncoder(tokenizer, add_special_tokens=True, chat_template="auto")
    token_ids = []
    for index, line in enumerate(Lines(file.lines(), file.where)):
        try:
            values = json.loads(line)
            if isinstance(values, dict) and "decode" in values:
                raise UserError("the row has decode settings of its own, but a bench has one for all")
            if isinstance(values, dict) and "prediction" in values:
                raise UserError("the row has a prediction, which a bench does not use: leave it out")
            if isinstance(values, dict) and isinstance(values.get("turns"), list):
                values = {"prompt": next(iter(values["turns"]), None)}
            token_ids.append(encoder.encode(parse_row(index, values)).token_ids)
        except (ValueError, RecursionError) as error:  # a UserError is a ValueError
            raise UserError(f"row {index} of {file.where} cannot be replayed: {error}") from error
    return token_ids


@dataclass(frozen=True)
class Round:
    """Times of one batch from submission to its last token, in seconds."""

    num_prompt_tokens: int  # of all rows
    first_token_s: list[float]  # per row
    step_s: list[float]  # of each step in which every row gets tokens
    # Each of these steps' time per token of a row. With draft tokens a step returns several tokens of a row.
    token_s: list[float]
    total_s: float


def measure(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> Round:
    """Submit a batch of prompts and step until every row has all its tokens."""
    requests = [engine.request(i, prompt, decode) for i, prompt in enumerate(prompts)]
    start = time.perf_counter()
    groups = [engine.add(request) for request in requests]
    first_token_s: dict[int, float] = {}
    step_s, token_s, before = list[float](), list[float](), start
    while num_rows := sum(bool(group.sequences) for group in groups):
        generating, num_tokens = len(first_token_s) == len(groups), engine.num_generated_tokens
        engine.step()
        while engine.is_next_computed:
            engine.step()
        now = time.perf_counter()
        if generating:
            step_s.append(now - before)
            token_s.append((now - before) * num_rows / max(1, engine.num_generated_tokens - num_tokens))
        else:
            for i, group in enumerate(groups):
                if group.num_output_tokens:
                    first_token_s.setdefault(i, now - start)
        before = now
    for group in groups:
        if group.error:
            raise group.error
    return Round(sum(map(len, prompts)), list(first_token_s.values()), step_s, token_s, before - start)


def rates(rounds: list[Round], bench: BenchConfig) -> dict[str, float | None]:
    """Return medians over the rounds."""
    first = [max(r.first_token_s) for r in rounds]
    decode = [
        bench.batch_size * (bench.new_tokens - 1) / (r.total_s - t1)
        for r, t1 in zip(rounds, first, strict=True)
        if r.step_s
    ]
    return {
        "prefill_tokens_per_s": statistics.median(
            r.num_prompt_tokens / t1 for r, t1 in zip(rounds, first, strict=True)
        ),
        "decode_tokens_per_s": statistics.median(decode) if decode else None,
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


def _memory(engine: Engine, bench: BenchConfig, rounds: list[Round]) -> dict[str, Any]:
    prompt_tokens = sum(r.num_prompt_tokens for r in rounds) // len(rounds)
    kv_bytes = engine.executor.kv_bytes_per_token * (prompt_tokens + bench.batch_size * (bench.new_tokens // 2))
    state_bytes = 2 * bench.batch_size * engine.executor.cache.bytes_per_slot  # read and written
    # The last round is closest in time to the measurement of the bandwidth. On a busy machine the bandwidth varies
    # within seconds.
    steps = rounds[-1].step_s
    bandwidth = memory_bandwidth(engine.device)
    share, unknown = None, "there was no step in which every row got a token"
    if steps:
        read_bytes = engine.executor.step_weight_bytes(bench.batch_size) + kv_bytes + state_bytes
        cache = cache_bytes(engine.device)
        share, unknown = share_of_bandwidth(read_bytes, statistics.median(steps), bandwidth, cache)
    if share is not None and share < LOW_SHARE:
        text = "the decode step reaches %.0f %% of the memory bandwidth: %s"
        log.warning(text, 100 * share, LOW_CAUSES[engine.device.type])
    return {
        "weight_bytes": engine.executor.weight_bytes,
        "kv_bytes": kv_bytes,
        "state_bytes": state_bytes,
        "state_slot": slot_cost(engine.executor.cache) or None,
        "memory_bandwidth_bytes_per_s": bandwidth,
        "decode_share_of_bandwidth": share,
        "decode_share_unknown": unknown or None,
    }


def _state_lines(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    if metrics["state_slot"] is None:
        return []
    return [("state", f"{metrics['state_bytes'] / 1e6:,.1f} MB a step; {metrics['state_slot']}")]


def _print(metrics: dict[str, Any], bench: BenchConfig, output_dir: Path) -> None:
    def shown(name: str, unit: str, factor: float = 1.0) -> str:
        return "-" if metrics[name] is None else f"{metrics[name] * factor:,.1f} {unit}"

    report.print_table(
        [
            (
                "batch",
                f"{bench.batch_size} x ({bench.data or bench.prompt_tokens} + {bench.new_tokens}) tokens, {bench.repeats} times",
            ),
            ("prefill", shown("prefill_tokens_per_s", "tokens/s")),
            ("decode", shown("decode_tokens_per_s", "tokens/s")),
            *report.draft_lines(metrics),
            ("weights", shown("weight_bytes", "MB", 1e-6)),
            *_state_lines(metrics),
            ("share of the bandwidth", metrics["decode_share_unknown"] or shown("decode_share_of_bandwidth", "%", 100)),
        ]
    )
    print(f"output: {output_dir}")

"""The bench counts what it says: real tokens, exact lengths, by the definitions of its rates."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import dump
from conf.errors import UserError
from conf.schema import BenchConfig, PredictConfig, RunConfig, Task
from pipelines import bench
from tests.builders import engine_of, run_config, write_llama


def job(folder: Path, **sizes: int) -> RunConfig:
    return replace(run_config(folder), task=Task.bench, predict=PredictConfig(), bench=BenchConfig(**sizes))


def test_lengths_are_exact_and_every_step_of_decode_is_timed(tmp_path: Path) -> None:
    write_llama(tmp_path, eos_token_id=list(range(96)))  # every token would end a row
    engine = engine_of(tmp_path, batch_size=3, max_batched_tokens=16)
    sizes: list[tuple[int, int]] = []
    run = engine.runner.run
    engine.runner.run = lambda batch: (sizes.append((len(batch.token_ids), len(batch.logit_rows))), run(batch))[1]  # type: ignore[method-assign]
    result = bench.measure(engine, BenchConfig(prompt_tokens=20, new_tokens=5, batch_size=3), seed=1)
    assert sum(tokens for tokens, _ in sizes) == 3 * (20 + 5 - 1)
    assert sum(rows for _, rows in sizes) == 3 * 5
    assert len(result.first_token_s) == 3
    assert len(result.step_s) == 4
    assert max(result.first_token_s) + sum(result.step_s) == pytest.approx(result.total_s)
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks


def test_rates_follow_their_definitions() -> None:
    rounds = [
        bench.Round([1.0, 2.0], [0.5, 1.5], 4.0),
        bench.Round([1.0, 4.0], [1.0, 1.0], 6.0),
        bench.Round([0.5, 1.0], [1.0, 3.0], 5.0),
    ]
    rates = bench._rates(rounds, BenchConfig(prompt_tokens=10, new_tokens=3, batch_size=2))
    assert rates == {"prefill_tokens_per_s": 10.0, "decode_tokens_per_s": 2.0}
    only_first = bench._rates([bench.Round([2.0], [], 2.0)], BenchConfig(prompt_tokens=10, new_tokens=1))
    assert only_first == {"prefill_tokens_per_s": 5.0, "decode_tokens_per_s": None}


def test_a_run_leaves_its_metrics(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    out = tmp_path / "out"
    bench.run_bench(job(tmp_path / "model", prompt_tokens=9, new_tokens=4, batch_size=2, repeats=2), out, dump)
    assert {file.name for file in out.iterdir()} == {"config.yaml", "environment.json", "metrics.json"}
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["prefill_tokens_per_s"] > 0
    assert metrics["decode_tokens_per_s"] > 0
    for name in ("time_to_first_token_s", "time_per_output_token_s"):
        assert 0 < metrics[name]["p50"] <= metrics[name]["p90"] <= metrics[name]["p99"]
    assert 0 < metrics["decode_share_of_bandwidth"] < 1
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert size * 0.9 < metrics["weight_bytes"] < size
    assert (
        metrics["kv_bytes"] == 2 * (9 + 2) * 2 * 2 * 2 * 16 * 4
    )  # rows, tokens, K and V, layers, heads, channels, float32


def test_what_the_context_does_not_take_is_refused_with_nothing_written(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    with pytest.raises(UserError, match="decode.max_new_tokens=64, together more than max_position_embeddings=128"):
        bench.run_bench(job(tmp_path / "model", prompt_tokens=100, new_tokens=64), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


def test_a_batch_above_the_token_budget_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(UserError, match="batch_size=5 is more than device.max_batched_tokens=4"):
        engine_of(tmp_path, batch_size=5, max_batched_tokens=4)

"""The bench counts what it says: real tokens, exact lengths, by the definitions of its rates."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import RunConfig, Task
from conf.tasks import BenchConfig, PredictConfig
from models.batch import Batch
from pipelines.engine.steps import StepOutputs
from pipelines.loading import bandwidth
from pipelines.tasks import bench
from tests.helpers.builders import engine_of, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.sweep_folders import check_names


def job(folder: Path, decode: DecodeConfig | None = None, **sizes: Any) -> RunConfig:
    run = replace(run_config(folder), predict=PredictConfig())
    return replace(run, task=Task.bench, bench=BenchConfig(**sizes), decode=decode or DecodeConfig())


def test_lengths_are_exact_and_every_step_of_decode_is_timed(tmp_path: Path) -> None:
    write_llama(tmp_path, eos_token_id=list(range(96)))  # every token would end a row
    engine = engine_of(tmp_path, batch_size=3, max_batched_tokens=16)
    sizes: list[tuple[int, int]] = []
    execute = engine.executor.execute

    def observed(batch: Batch, token_ids: Tensor | None = None) -> StepOutputs:
        sizes.append((batch.shape.num_tokens, batch.shape.num_outputs))
        return execute(batch, token_ids)

    engine.executor.execute = observed  # type: ignore[method-assign]
    run_of = job(tmp_path, prompt_tokens=20, new_tokens=5, batch_size=3)
    prompts = next(bench.prompt_batches(run_of.bench, engine))
    result = bench.measure(engine, prompts, bench.decode_config(run_of.decode, run_of.bench.new_tokens))
    assert sum(tokens for tokens, _ in sizes) == 3 * (20 + 5 - 1)
    assert sum(rows for _, rows in sizes) == 3 * 5
    assert len(result.first_token_s) == 3
    assert len(result.step_s) == 4
    assert max(result.first_token_s) + sum(result.step_s) == pytest.approx(result.total_s)
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks
    sizes.clear()
    bench.measure(engine, prompts, bench.decode_config(run_of.decode, run_of.bench.new_tokens))
    assert sum(tokens for tokens, _ in sizes) == 3 * (20 + 5 - 1)  # though the cache could know the prompts by now


def test_rates_follow_their_definitions() -> None:
    rounds = [
        bench.Round(20, [1.0, 2.0], [0.5, 1.5], [0.5, 1.5], 4.0),
        bench.Round(20, [1.0, 4.0], [1.0, 1.0], [1.0, 1.0], 6.0),
        bench.Round(20, [0.5, 1.0], [1.0, 3.0], [1.0, 3.0], 5.0),
    ]
    rates = bench.rates(rounds, BenchConfig(prompt_tokens=10, new_tokens=3, batch_size=2))
    assert rates == {"prefill_tokens_per_s": 10.0, "decode_tokens_per_s": 2.0}
    only_first = bench.rates([bench.Round(10, [2.0], [], [], 2.0)], BenchConfig(prompt_tokens=10, new_tokens=1))
    assert only_first == {"prefill_tokens_per_s": 5.0, "decode_tokens_per_s": None}


def test_a_run_leaves_its_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llama(tmp_path / "model")
    out = tmp_path / "out"
    bench.run_bench(job(tmp_path / "model", prompt_tokens=9, new_tokens=4, batch_size=2, repeats=2), out, dump)
    assert "decode." not in caplog.text  # what a bench sets itself is no unused setting of its user
    assert {file.name for file in out.iterdir()} == {"config.yaml", "environment.json", "metrics.json"}
    metrics = json.loads((out / "metrics.json").read_text())
    check_names(metrics)
    assert metrics["prefill_tokens_per_s"] > 0
    assert metrics["decode_tokens_per_s"] > 0
    for name in ("time_to_first_token_s", "time_per_output_token_s"):
        assert 0 < metrics[name]["p50"] <= metrics[name]["p90"] <= metrics[name]["p99"]
    assert metrics["memory_bandwidth_bytes_per_s"] > 0
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert size * 0.9 < metrics["weight_bytes"] < size * 1.05  # packed weights have outputs up to 16s
    assert (
        metrics["kv_bytes"] == 2 * (9 + 2) * 2 * 2 * 2 * 16 * 4
    )  # rows, tokens, K and V, layers, heads, channels, float32


@each(
    ("cache", "bandwidth", "share", "said"),
    [
        (2**30, 1e9, None, r"a step reads 0.\d MB, which fit the cache of 1,074 MB"),
        (0, 1.0, None, "a step is faster than the memory was when it was measured"),
        (0, 1e15, 0.0, r"share of the bandwidth +0.0 %"),
    ],
)
def test_a_share_is_printed_where_memory_is_what_a_step_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    cache: int, bandwidth: float, share: float | None, said: str,
) -> None:  # fmt: skip
    write_llama(tmp_path / "model")
    monkeypatch.setattr(bench, "cache_bytes", lambda device: cache)
    monkeypatch.setattr(bench, "memory_bandwidth", lambda device: bandwidth)
    sizes = {"prompt_tokens": 9, "new_tokens": 4, "repeats": 1}
    bench.run_bench(job(tmp_path / "model", **sizes), tmp_path / "out", dump)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["decode_share_of_bandwidth"] == (share if share is None else pytest.approx(share, abs=0.01))
    assert (metrics["decode_share_unknown"] is None) == (share is not None)
    assert re.search(said, capsys.readouterr().out)


def test_a_share_is_of_the_steps_just_before_the_bandwidth_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model")
    rounds = iter([bench.Round(9, [1.0], [seconds] * 3, [seconds] * 3, 9.0) for seconds in (1.0, 1.0, 4.0)])
    monkeypatch.setattr(bench, "measure", lambda *arguments: next(rounds))
    monkeypatch.setattr(bench, "cache_bytes", lambda device: 0)
    monkeypatch.setattr(bench, "memory_bandwidth", lambda device: 1e6)
    bench.run_bench(job(tmp_path / "model", prompt_tokens=9, new_tokens=4, repeats=3, warmup=0), tmp_path / "out", dump)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    read = metrics["weight_bytes"] + metrics["kv_bytes"]
    assert metrics["decode_share_of_bandwidth"] == pytest.approx(read / 4.0 / 1e6, rel=0.2)  # less of the embedding


def test_the_last_caches_of_all_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dies of two processors, each with a third-level cache of 32 MB; only three of the processors are ours."""
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for level, of, size in ((1, str(cpu), "48K"), (3, shared, "32M")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("shared_cpu_list", of), ("size", size)):
                (folder / name).write_text(text + "\n")
    monkeypatch.setattr(bandwidth, "CPUS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 3})
    assert bandwidth.cache_bytes(torch.device("cpu")) == 2 * 32 * 2**20
    (tmp_path / "cpu3" / "cache" / "index3" / "size").write_text("much\n")
    assert bandwidth.cache_bytes(torch.device("cpu")) == 0


def test_bytes_of_a_quantised_cache_are_those_it_takes(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    run = job(tmp_path / "model", prompt_tokens=9, new_tokens=4, batch_size=2, repeats=1)
    bench.run_bench(replace(run, quant=QuantConfig(kv_cache=KVCacheFormat.int8)), tmp_path / "out", dump)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["kv_bytes"] == 2 * (9 + 2) * 2 * 2 * 2 * (
        16 + 4
    )  # as above, of an int8 channel each and a float32 scale


@each(
    "decode",
    [
        DecodeConfig(temperature=0.8, top_p=0.9),
        DecodeConfig(num_beams=3, early_stopping=True),
        DecodeConfig(penalty_alpha=0.6, top_k=3),
    ],
)
def test_every_way_to_choose_tokens_has_exact_lengths(tmp_path: Path, decode: DecodeConfig) -> None:
    write_llama(tmp_path, eos_token_id=list(range(96)))
    run = job(tmp_path, decode, prompt_tokens=9, new_tokens=6, batch_size=2)
    engine = engine_of(tmp_path, batch_size=2)
    result = bench.measure(
        engine, next(bench.prompt_batches(run.bench, engine)), bench.decode_config(run.decode, run.bench.new_tokens)
    )
    assert len(result.first_token_s) == 2
    # A contrastive candidate is a token only once the step after it has chosen it.
    assert len(result.step_s) == 5


def test_lengths_that_the_checkpoint_suggests_are_not_setting_of_the_run(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"max_new_tokens": 15, "repetition_penalty": 1.5}')
    bench.run_bench(job(tmp_path / "model", prompt_tokens=9, new_tokens=4, repeats=1), tmp_path / "out", dump)
    saved = OmegaConf.load(tmp_path / "out" / "config.yaml").decode
    assert (saved.max_new_tokens, saved.repetition_penalty) == (None, 1.5)


@each(
    ("decode", "message"),
    [
        (DecodeConfig(max_new_tokens=5), "decode.max_new_tokens=5 is not used by task=bench: .* bench.new_tokens"),
        (DecodeConfig(stop=["x"]), r"decode.stop=\['x'\] is not used by task=bench"),
        (DecodeConfig(n=2), "decode.n=2 is not used by task=bench"),
    ],
)
def test_settings_that_a_bench_overrides_are_refused(tmp_path: Path, decode: DecodeConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.run_bench(job(tmp_path, decode), tmp_path / "out", dump)


def test_prompts_of_a_file_are_replayed_with_their_lengths(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["Write a story.", "Now a poem."]},
        {"prompt": "Hello"},
        {"messages": [{"role": "user", "content": "今天天气很好"}]},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    engine = engine_of(chatty, tokenizer="")
    assert engine.tokenizer is not None
    batches = bench.prompt_batches(BenchConfig(data=str(data), batch_size=2), engine)
    first, second, third = next(batches), next(batches), next(batches)
    assert first[0] == engine.tokenizer.encode("Write a story.", True)
    assert second[1] == first[0]  # after the last row the first one again
    assert third == [first[1], second[0]]
    run = job(chatty, data=str(data), new_tokens=3, batch_size=2, repeats=2)
    run = replace(run, model=replace(run.model, tokenizer=""))
    bench.run_bench(run, tmp_path / "out", dump)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["decode_tokens_per_s"] > 0


@each(
    ("content", "message"),
    [
        ('{"prompt": "x", "decode": {}}', "row 0 of bench.data=.* cannot be replayed: the row has decode settings"),
        ('{"turns": []}', "row 0 of bench.data=.* cannot be replayed: the row has none of prompt"),
        ('{"prompt": "x"}\nnope', "row 1 of bench.data=.* cannot be replayed: Expecting value"),
        ("", "questions.jsonl has no prompts"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused(chatty: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "questions.jsonl").write_text(content)
    engine = engine_of(chatty, tokenizer="")
    with pytest.raises(UserError, match=message):
        next(bench.prompt_batches(BenchConfig(data=str(tmp_path / "questions.jsonl")), engine))


def test_a_table_is_replayed(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\nWrite a story.\n")
    engine = engine_of(chatty, tokenizer="")
    assert engine.tokenizer is not None
    batch = next(bench.prompt_batches(BenchConfig(data=str(tmp_path / "a.csv")), engine))
    assert batch == [engine.tokenizer.encode("Write a story.", True)]


def test_a_file_that_is_not_there_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bench.data=nowhere.jsonl is not a file: give a .jsonl"):
        bench.run_bench(job(tmp_path, data="nowhere.jsonl"), tmp_path / "out", dump)


def test_a_bench_beyond_the_context_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    with pytest.raises(UserError, match="decode.max_new_tokens=64, together more than max_position_embeddings=128"):
        bench.run_bench(job(tmp_path / "model", prompt_tokens=100, new_tokens=64), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


def test_a_batch_above_the_token_budget_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(UserError, match="batch_size=5 is more than device.max_batched_tokens=4"):
        engine_of(tmp_path, batch_size=5, max_batched_tokens=4)

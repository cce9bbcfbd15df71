"""Prompts kept in a file: bit-identical in another engine, and refused after any difference."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import Gemma3ForCausalLM

from conf.compose import compose_run_config, dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DType, RunConfig, Task
from conf.tasks import PrefixConfig
from models.formats.safetensors_writer import save_tensors
from pipelines.engine import Engine
from pipelines.loading import fingerprint
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.prefix import run_prefix
from tests.helpers.adapters import write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.catalog import write_other
from tests.helpers.command import run as command
from tests.helpers.kept_prefixes import BEGINNING, DECODE, OTHER, complete, keep, write_data
from tests.helpers.quantized_models import STATIC_CACHES, make, quantize_run, random_rows, write_rows
from tests.helpers.soft_prefixes import write_paddle
from tests.helpers.tiers import in_turn, tiers

CACHES, DTYPES = [*(format.name for format in KVCacheFormat), *STATIC_CACHES], [DType.float32, DType.bfloat16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def with_kept(run: RunConfig, *files: Path, **device: Any) -> Engine:
    kept = [str(file) for file in files]
    return load_engine(replace(run, device=replace(run.device, kept_prefixes=kept, **device)), 3)


def run_of(folder: Path, **changes: Any) -> RunConfig:
    return replace(run_config(folder), **changes)


@pytest.mark.parametrize(("kv_cache", "dtype"), tiers(product(CACHES, DTYPES), long=in_turn(CACHES, DTYPES)))
def test_log_probabilities_are_equal_to_the_bit(folder: Path, tmp_path: Path, kv_cache: str, dtype: DType) -> None:
    """With every cache format, and with other sizes of blocks and steps."""
    quant = QuantConfig()
    if kv_cache in STATIC_CACHES:
        data = write_rows(tmp_path / "rows.jsonl", random_rows(18, 16))
        static = QuantConfig(**STATIC_CACHES[kv_cache])
        make(quantize_run(folder, static, tmp_path / "made", data, sequence_length=18), tmp_path / "run")
        folder = tmp_path / "made"
    else:
        quant = QuantConfig(kv_cache=KVCacheFormat[kv_cache])
    run = run_of(folder, quant=quant)
    run = replace(run, model=replace(run.model, dtype=dtype))
    rows = {"prompt_token_ids": BEGINNING}, {"prompt_token_ids": OTHER}, {"prompt_token_ids": BEGINNING[:33]}
    metrics = keep(run, tmp_path / "kept", *rows)
    names = "num_prompts", "num_prompt_tokens", "num_kept_prompts", "num_kept_tokens"
    assert metrics["unused_fields"] == []
    assert [metrics[name] for name in names] == [3, 41 + 37 + 33, 2, 32 + 32]  # blocks of 16
    prompts = {16: [*BEGINNING, 7, 8], 8: [*OTHER, 3], 4: BEGINNING[:32]}
    plain = load_engine(run, 3)
    for size, prompt in prompts.items():
        engine = with_kept(run, tmp_path / "kept", block_size=size, max_batched_tokens=11)
        output, expected = complete(engine, prompt), complete(plain, prompt, replace(DECODE, prefix_cache=False))
        assert output.completions == expected.completions
        assert output.num_cached_tokens == {16: 32, 8: 32, 4: 28}[size]
        assert complete(engine, prompt).completions == expected.completions


def test_kept_values_are_read(folder: Path, tmp_path: Path) -> None:
    """Other numbers in the file give other log probabilities, so they are not recomputed."""
    run = run_of(folder)
    keep(run, tmp_path / "kept")
    with safe_open(tmp_path / "kept", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["layers.0.values.0"].neg_()
    save_tensors(tmp_path / "other", tensors, metadata)
    right, wrong = (complete(with_kept(run, tmp_path / name), [*BEGINNING, 3]) for name in ("kept", "other"))
    assert right.completions[0].logprobs != wrong.completions[0].logprobs


def test_fields_that_nothing_reads_are_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = keep(run_of(folder), tmp_path / "kept", {"prompt_token_ids": BEGINNING, "prefx": "p"})
    assert metrics["unused_fields"] == ["prefx"]
    assert "fields of the rows that are not used: prefx" in capsys.readouterr().out


def test_kept_blocks_stay_while_others_come_and_go(folder: Path, tmp_path: Path) -> None:
    run = run_of(folder)
    keep(run, tmp_path / "kept")
    per_token = load_engine(run, 1).executor.kv_bytes_per_token
    engine = with_kept(run, tmp_path / "kept", kv_cache_memory=str(6 * 16 * per_token))
    assert engine.requests.num_blocks == 4
    for _ in range(3):
        assert complete(engine, OTHER).num_cached_tokens in (0, 32)
        assert complete(engine, [3, 4, *OTHER[:30]]).num_cached_tokens in (0, 16)
        assert complete(engine, [*BEGINNING, 3]).num_cached_tokens == 32
    with pytest.raises(UserError, match="KV cache holds 64"):
        engine.request(0, BEGINNING, DecodeConfig(max_new_tokens=30))


def test_salts_and_soft_prefixes_keep_rows_apart(folder: Path, tmp_path: Path) -> None:
    """A soft prefix ends within a block, whose remaining slots are the prompt's."""
    write_paddle(tmp_path / "p.npy", 9)
    run = run_of(folder)
    soft = replace(run, model=replace(run.model, prefixes={"p": str(tmp_path / "p.npy")}))
    row = {"prompt_token_ids": BEGINNING}
    keep(soft, tmp_path / "kept", row | {"prefix": "p"}, row | {"decode": {"cache_salt": "x"}})
    salted = replace(DECODE, cache_salt="x")
    for size, cached in {16: 39, 4: 39, 8: 39}.items():
        engine, plain = with_kept(soft, tmp_path / "kept", block_size=size), load_engine(soft, 3)
        behind = complete(engine, [*BEGINNING, 3], prefix="p")
        assert behind.completions == complete(plain, [*BEGINNING, 3], prefix="p").completions
        assert behind.num_cached_tokens == cached
        assert complete(engine, [*BEGINNING, 3]).num_cached_tokens == 0
        engine = with_kept(soft, tmp_path / "kept", block_size=size)
        behind = complete(engine, [*BEGINNING, 3], salted)  # their positions in the file come after a soft prefix's
        assert behind.num_cached_tokens == 32
        assert behind.completions == complete(plain, [*BEGINNING, 3], salted).completions
        # The soft prefix's own blocks, the rest of 48 slots after it, and the 32 of the salted row.
        assert engine.num_blocks - engine.requests.num_blocks == {16: 1 + 3 + 2, 8: 2 + 5 + 4, 4: 3 + 10 + 8}[size]
    with pytest.raises(
        UserError, match="holds a prompt after the soft prefix .{12}..., which is not in model.prefixes"
    ):
        with_kept(run, tmp_path / "kept")


def test_adapters_keep_rows_apart(tmp_path: Path) -> None:
    """Another adapter with the same name does not match, and a missing adapter is reported. Windows have own blocks."""
    folder = tmp_path / "gemma"
    write_other(folder, "gemma3", max_position_embeddings=1024)
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, folder, Gemma3ForCausalLM, seed=seed, target_modules=["q_proj", "v_proj"])
    run = run_of(folder)

    def adapted(**folders: Path) -> RunConfig:
        return replace(run, model=replace(run.model, adapters={name: str(path) for name, path in folders.items()}))

    row = {"prompt_token_ids": BEGINNING}
    keep(adapted(fr=tmp_path / "a"), tmp_path / "kept", row | {"adapter": "fr"})
    moved = adapted(de=tmp_path / "b", other=tmp_path / "a")
    engine, plain = with_kept(moved, tmp_path / "kept"), load_engine(moved, 3)
    assert engine.executor.cache.num_window_blocks > 0
    output = complete(engine, [*BEGINNING, 3], adapter="other")
    assert output.num_cached_tokens == 32
    assert output.completions == complete(plain, [*BEGINNING, 3], adapter="other").completions
    for name in (None, "de"):
        output = complete(engine, [*BEGINNING, 3], adapter=name)
        assert output.num_cached_tokens == 0
        assert output.completions == complete(plain, [*BEGINNING, 3], adapter=name).completions
    for other in (run, adapted(fr=tmp_path / "b")):
        message = r"holds a prompt with the adapter .{12}\.\.\., which is not in model.adapters: give it too, or leave"
        with pytest.raises(UserError, match=message):
            with_kept(other, tmp_path / "kept")


def test_another_identity_is_refused_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, kept = run_of(folder), tmp_path / "kept"
    keep(run, kept)
    (tmp_path / "twin").mkdir()
    write_llama(tmp_path / "twin", rms_norm_eps=1e-4)
    half = replace(run, model=replace(run.model, dtype=DType.bfloat16))
    cases = [
        (run_of(folder, quant=QuantConfig(kv_cache=KVCacheFormat.int8)), "quant"),
        (run_of(folder, quant=QuantConfig(QuantScheme.int8)), "quant"),
        (half, "model.dtype"),
        (run_of(tmp_path / "twin"), "model/config.json, model/model.safetensors"),
    ]
    for other, names in cases:
        with pytest.raises(UserError, match=f"kept is of other {names}: make it again by task=prefix, or leave it out"):
            with_kept(other, kept)
    monkeypatch.setattr(fingerprint, "SOURCES", ("kernels", "models"))
    with pytest.raises(UserError, match="kept is of other code: make it again"):
        with_kept(run, kept)


def test_damaged_and_missing_files_are_refused(folder: Path, tmp_path: Path) -> None:
    run, kept = run_of(folder), tmp_path / "kept"
    keep(run, kept)
    with safe_open(kept, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    bad = tmp_path / "bad"

    def refused(message: str, tensors: dict[str, torch.Tensor] = tensors, **meta: str) -> None:
        save_tensors(bad, tensors, metadata | meta)
        with pytest.raises(UserError, match=message):
            with_kept(run, bad)

    (row,) = json.loads(metadata["rows"])
    wrong = {"num_tokens": 0}, {"root": "xy"}, {"prefix": 3}, {"adapter": None}, {"more": 1}
    without = {name: value for name, value in row.items() if name != "adapter"}
    for rows in (
        "",
        "{}",
        "[3]",
        "[{}]",
        *(json.dumps([wrong_row]) for wrong_row in (*(row | w for w in wrong), without)),
    ):
        refused("bad is damaged, or was not made by task=prefix: make it again", rows=rows)
    refused("is damaged", identity="[]")
    for wrong_tokens in ({}, {"tokens": tensors["tokens"].float()}, {"tokens": tensors["tokens"][None]}):
        refused("is damaged", {other: t for other, t in tensors.items() if other != "tokens"} | wrong_tokens)
    refused(
        r"keys.0 is torch.float32\[32, 2, 16\], not torch.float32\[33, 2, 16\]",
        rows=json.dumps([row | {"num_tokens": 33}]),
    )
    name = "layers.1.keys.0"
    refused(f"{name} is missing, not", {other: t for other, t in tensors.items() if other != name})
    refused(f"{name} is .*float64", tensors | {name: tensors[name].double()})
    refused(f"{name} is ", tensors | {name: tensors[name][:, :1]})
    refused(f"{name} holds NaN or infinite numbers: make it again", tensors | {name: tensors[name] / 0})
    refused("more is .*, not in this cache", tensors | {"more": torch.zeros(3)})
    bad.write_bytes(kept.read_bytes()[:-40])
    with pytest.raises(UserError, match="bad is truncated or not a safetensors file"):
        with_kept(run, bad)
    with pytest.raises(UserError, match="nowhere is not a file: make it by task=prefix prefix.output="):
        with_kept(run, tmp_path / "nowhere")


def test_a_set_larger_than_the_pool_is_refused(folder: Path, tmp_path: Path) -> None:
    run = run_of(folder)
    keep(run, tmp_path / "kept")
    per_token = load_engine(run, 1).executor.kv_bytes_per_token
    with pytest.raises(
        UserError, match="kept needs 2 blocks of the KV cache, but 2 are free: raise device.kv_cache_memory"
    ):
        with_kept(run, tmp_path / "kept", kv_cache_memory=str(2 * 16 * per_token))


def test_prompts_that_cannot_be_kept_are_refused(folder: Path, tmp_path: Path) -> None:
    run, kept = run_of(folder), tmp_path / "kept"
    with pytest.raises(UserError, match="no prompt .* fills a block .*, device.block_size=16: give longer"):
        keep(run, kept, {"prompt_token_ids": BEGINNING[:15]})
    with pytest.raises(UserError, match="row 1 of prefix.data: prompt token id 96 is not in the vocabulary"):
        keep(run, kept, {"prompt_token_ids": BEGINNING}, {"prompt_token_ids": [96]})
    assert not kept.exists()
    keep(run, kept)
    with pytest.raises(UserError, match="prefix.output=.*kept exists: remove it, or give another file"):
        keep(run, kept)
    with pytest.raises(UserError, match="there is no folder .*: make it, or give another file"):
        _keep_in(run, tmp_path / "nowhere" / "kept", tmp_path)
    with pytest.raises(UserError, match="decode.temperature=0.5 is not used by task=prefix: leave it out"):
        keep(replace(run, decode=DecodeConfig(temperature=0.5)), tmp_path / "other")
    for config, message in (
        (PrefixConfig(), "prefix.data is missing: give"),
        (PrefixConfig(data="x"), "prefix.output is missing"),
    ):
        with pytest.raises(UserError, match=message):
            run_prefix(
                replace(run, task=Task.prefix, predict=RunConfig().predict, prefix=config), tmp_path / "out", dump
            )
    (tmp_path / "dynamic").mkdir()
    write_llama(tmp_path / "dynamic", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UserError, match="task=prefix is not possible with this model, whose prompts cannot share"):
        keep(run_of(tmp_path / "dynamic"), tmp_path / "dynamic.kept")
    with pytest.raises(UserError, match="device.kept_prefixes is not possible with this model"):
        with_kept(run_of(tmp_path / "dynamic"), kept)


def _keep_in(run: RunConfig, output: Path, data_folder: Path) -> None:
    data = write_data(data_folder / "rows.jsonl", {"prompt_token_ids": BEGINNING})
    config = PrefixConfig(data=str(data), output=str(output))
    run_prefix(replace(run, task=Task.prefix, predict=RunConfig().predict, prefix=config), data_folder / "run", dump)


def test_settings_that_are_not_used_are_refused() -> None:
    device = replace(RunConfig().device, kept_prefixes=["x"])
    with pytest.raises(UserError, match="device.kept_prefixes=.* is not used by task=bench: leave it at"):
        RunConfig(task=Task.bench, device=device)
    with pytest.raises(UserError, match="device.kept_prefixes=.* is not used by decode.prefix_cache=false"):
        RunConfig(device=device, decode=DecodeConfig(prefix_cache=False))
    with pytest.raises(
        UserError, match="prefix.output=x is not used by task=predict: leave it at null, or give task=prefix"
    ):
        RunConfig(prefix=PrefixConfig(output="x"))
    run = compose_run_config(["task=prefix", "prefix.data=Once", "prefix.output=kept"])
    assert (run.task, run.prefix.output) == (Task.prefix, "kept")


@pytest.mark.long
def test_a_new_process_predicts_the_same_bytes(tmp_path: Path) -> None:
    """With the bundled model, from the command line."""
    text = "Once upon a time there was a little dog who lived in a big house with a red door and a green garden. " * 3
    data = write_data(tmp_path / "rows.jsonl", *({"prompt": text + end} for end in ("One day", "The dog", "")))
    common = ["device=cpu", "decode.logprobs=2", "decode.max_new_tokens=8"]
    kept = tmp_path / "kept"
    done = command(
        "task=prefix",
        "device=cpu",
        f"prefix.data={text}",
        f"prefix.output={kept}",
        f"hydra.run.dir={tmp_path / 'made'}",
    )
    assert done.returncode == 0, done.stderr
    for name, more in {"plain": [], "with": [f"device.kept_prefixes=[{kept}]"]}.items():
        done = command(f"predict.data={data}", *common, *more, f"hydra.run.dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    plain, behind = ((tmp_path / name / "predictions.jsonl").read_bytes() for name in ("plain", "with"))
    assert plain == behind
    cached = [
        json.loads((tmp_path / name / "metrics.json").read_text())["num_cached_tokens"] for name in ("plain", "with")
    ]
    assert cached[0] < cached[1]

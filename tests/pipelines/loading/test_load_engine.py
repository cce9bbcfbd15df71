"""From a RunConfig to an engine: threads, dtypes, eos, tokenizers, contexts."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig
from kernels import build
from kernels.threads import set_threads
from pipelines.engine.kv_cache import free_memory
from pipelines.jobs.report import peak_memory_bytes
from pipelines.loading import model_source
from pipelines.loading.load_engine import load_engine
from pipelines.loading.quantize import calibrated
from tests.helpers.builders import all_logits, complete, engine_of, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.quantized_models import CALIBRATED


def test_threads_are_set(tmp_path: Path) -> None:
    write_llama(tmp_path)
    before = torch.get_num_threads()
    try:
        load_engine(replace(run_config(tmp_path), device=DeviceConfig(DeviceType.cpu, threads=1)), 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_threads_of_an_earlier_run_are_forgotten(tmp_path: Path) -> None:
    write_llama(tmp_path)
    library, before = build.library(), torch.get_num_threads()
    if library is None:
        pytest.skip("torch's threads alone are tested above")
    set_threads(None)
    at_first = library.get_threads()
    try:
        load_engine(replace(run_config(tmp_path), device=DeviceConfig(DeviceType.cpu, threads=at_first + 1)), 1)
        assert library.get_threads() == at_first + 1
        load_engine(run_config(tmp_path), 1)
        assert library.get_threads() == at_first
    finally:
        set_threads(None)
        torch.set_num_threads(before)


def test_decode_threads_need_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    monkeypatch.setattr("kernels.build.library", lambda: None)
    with pytest.raises(UserError, match="device.decode_threads=1 needs the C.. kernels, which are off: leave it out"):
        load_engine(replace(run_config(tmp_path), device=DeviceConfig(DeviceType.cpu, decode_threads=1)), 1)


@each("dtype", ["bfloat16", "float16"])
def test_half_precision_is_the_model_rounded(tmp_path: Path, dtype: str) -> None:
    write_llama(tmp_path)
    prompt = list(range(5, 30))
    exact = all_logits(engine_of(tmp_path), prompt)
    run = run_config(tmp_path)
    half = all_logits(load_engine(replace(run, model=replace(run.model, dtype=DType[dtype])), 1), prompt)
    assert half.dtype == getattr(torch, dtype)
    # Rounding errors of one unit in the last place each, a few dozen of them along the two layers, seldom all with one
    # sign.
    tolerance = 16 * torch.finfo(half.dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(half.float(), exact, atol=tolerance, rtol=0)


@each(
    ("config", "generation", "expected"),
    [
        (5, None, {5}),
        ([5, 6], None, {5, 6}),
        (5, {"eos_token_id": [7, 8]}, {7, 8}),
        (5, {"eos_token_id": 9}, {9}),
        (5, {"temperature": 0.5}, {5}),
        (None, None, set()),
    ],
)
def test_eos_comes_from_generation_config_before_config(
    tmp_path: Path, config: object, generation: dict[str, object] | None, expected: set[int]
) -> None:
    write_llama(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": config}))
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    request = engine_of(tmp_path).request(0, [5], DecodeConfig())
    assert request.params.end_token_ids == expected


@each(
    ("content", "message"),
    [
        ('{"eos_token_id": "end"}', "eos_token_id='end' of the checkpoint is neither an id nor a list of ids"),
        ('{"eos_token_id": [1, true]}', r"eos_token_id=\[1, True\] of the checkpoint is neither"),
        ("{", "generation_config.json cannot be read"),
        ("[]", "generation_config.json holds a list, not a JSON object"),
    ],
)
def test_bad_generation_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    write_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path)


def test_unread_config_keys_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llama(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "logit_softcap": 30.0}))
    with caplog.at_level(logging.WARNING):
        engine_of(tmp_path)
    assert "has keys that are not used: logit_softcap" in caplog.text


def test_tokenizer_from_another_folder(tmp_path: Path, chatty: Path) -> None:
    write_llama(tmp_path / "model", vocab_size=330)
    assert engine_of(tmp_path / "model", tokenizer="").tokenizer is None
    assert engine_of(tmp_path / "model", tokenizer=str(chatty)).tokenizer is not None
    for wrong in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"model.tokenizer={wrong} is not a folder with tokenizer files"):
            engine_of(tmp_path / "model", tokenizer=str(wrong))


def test_ids_of_the_tokenizer_that_the_model_lacks(
    tmp_path: Path, chatty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 3 1B has such an id for images: a prompt with it is an error, and other prompts work."""
    write_llama(tmp_path, vocab_size=329)
    engine = engine_of(tmp_path, tokenizer=str(chatty))
    (message,) = caplog.messages
    assert message.endswith("has ids up to 329, but the model's vocabulary is 329: prompts with such ids are errors")
    assert engine.requests.make(0, [1, 328], DecodeConfig()).prompt_token_ids == [1, 328]
    with pytest.raises(UserError, match="prompt token id 329 is not in the vocabulary: give ids from 0 to 328"):
        engine.requests.make(0, [1, 329], DecodeConfig())
    write_llama(tmp_path, vocab_size=400)  # padded, as vocabularies often are
    assert engine_of(tmp_path, tokenizer=str(chatty)).tokenizer is not None


def test_tensors_that_hold_nan_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_llama(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
        model.model.norm.weight[0], model.model.norm.weight[1] = torch.inf, -torch.inf  # its sum is NaN
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        engine_of(tmp_path)
    assert "1 tensors hold NaN: model.layers.1.mlp.up_proj.weight" in caplog.text


def test_model_max_length_limits_every_sequence(tmp_path: Path) -> None:
    write_llama(tmp_path)
    engine = load_engine(run_config(tmp_path, max_length=20), 1)
    assert len(complete(engine, [[5] * 15], DecodeConfig())[0].token_ids) == 5
    with pytest.raises(UserError, match="decode.max_length=21 is more than the model takes .model.max_length=20"):
        engine.requests.check(DecodeConfig(max_length=21))


def test_an_automatic_pool_has_room_for_a_rows_own_beams_and_takes_no_memory(tmp_path: Path) -> None:
    write_llama(tmp_path)
    engine = engine_of(tmp_path, batch_size=1)
    assert engine.request(0, [5] * 10, DecodeConfig(max_new_tokens=100, num_beams=12))
    before = peak_memory_bytes(engine.device)
    write_llama(tmp_path, max_position_embeddings=2**20)
    pool = engine_of(tmp_path, batch_size=1)
    assert pool.scheduler.block_manager.num_blocks * pool.block_size * pool.executor.kv_bytes_per_token > 2**31
    assert peak_memory_bytes(engine.device) - before < 2**30  # the pool's pages are not allocated yet


def test_an_automatic_pool_has_room_for_the_samples_of_all_rows(tmp_path: Path) -> None:
    write_llama(tmp_path)
    engine = load_engine(replace(run_config(tmp_path), decode=DecodeConfig(n=20, temperature=1.0)), 2)
    assert engine.num_blocks * engine.block_size == 2 * 20 * engine.config.context.num_tokens


@each(
    ("name", "value", "message"),
    [
        ("cuda_graphs", False, "device.cuda_graphs=false is not used on a CPU: leave it at true, or give device=cuda"),
        (
            "memory_fraction",
            0.5,
            "device.memory_fraction=0.5 is not used on a CPU: leave it at 0.9, or give device=cuda",
        ),
    ],
)
def test_options_of_gpus_are_refused_on_a_cpu(tmp_path: Path, name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path, **{name: value})


def test_on_a_gpu_no_more_is_free_than_the_fraction_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use 100 of 1000 bytes. This process has reserved 300, and uses 250 of them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 250)
    free = {fraction: free_memory(torch.device("cuda"), fraction) for fraction in (1.0, 0.9, 0.5, 0.25, 0.1)}
    assert free == {1.0: 650, 0.9: 650, 0.5: 250, 0.25: 0, 0.1: 0}


def test_stretched_context_counts(tmp_path: Path) -> None:
    write_llama(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=32)
    assert str(engine_of(tmp_path).config.context) == "stretched max_position_embeddings=64"


def test_a_batch_that_no_step_takes_is_refused_before_anything_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path)
    monkeypatch.setattr(calibrated, "find_or_make", None)
    run = replace(run_config(tmp_path), quant=CALIBRATED["a8w8 static"])
    with pytest.raises(UserError, match="batch_size=2049 is more than device.max_batched_tokens=2048.*: give a "):
        load_engine(run, 2049)


def test_a_made_model_keeps_the_tokenizers_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer_folder = "/cache/org/tok/v1"
    monkeypatch.setattr(model_source, "find_tokenizer", lambda path, hub, revision: Path("/cache") / path / revision)
    model = ModelConfig("org/name", tokenizer="org/tok", revision="v1", max_length=9)
    assert model_source.replace_model_path(model, Path("/made")) == ModelConfig(
        "/made", tokenizer=tokenizer_folder, max_length=9
    )
    plain = ModelConfig("org/name", tokenizer="org/tok")
    assert model_source.replace_model_path(plain, Path("/made")) == ModelConfig("/made", tokenizer="org/tok")

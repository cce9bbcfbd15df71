"""quant.probe on the bundled model: its numbers against separate engines, its file, and runs without it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, ModelConfig, RunConfig, Task, Weights
from models.tiny.corpus import documents
from pipelines.engine import Engine, ProbeResult
from pipelines.jobs.report import peak_memory_bytes, reset_peak_memory
from pipelines.loading import divergence, probe
from pipelines.loading.load_engine import load_engine
from pipelines.loading.quantize.calibration_data import BUILT_IN_SEED
from tests.helpers.builders import all_logits

INT4 = QuantConfig(QuantScheme.int4, group_size=32, kv_cache=KVCacheFormat.int4)
RUN = RunConfig(
    task=Task.predict, model=ModelConfig(path="models/tiny"), device=DeviceConfig(type=DeviceType.cpu), quant=INT4
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    return tmp_path / "probes"


def load(run: RunConfig = RUN, **quant: Any) -> Engine:
    return load_engine(replace(run, quant=replace(run.quant, **quant)), 1)


def log_probabilities(quant: QuantConfig, token_ids: list[int]) -> torch.Tensor:
    engine = load_engine(replace(RUN, quant=replace(quant, probe=False, probe_kl=QuantConfig().probe_kl)), 1)
    assert engine.divergence is None
    return all_logits(engine, token_ids)[:-1].double().log_softmax(-1)


def test_divergence_is_measured_once_and_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = load(probe_kl=0)
    first = engine.divergence
    assert first is not None
    assert engine.tokenizer is not None
    token_ids: list[int] = []
    for text in documents(BUILT_IN_SEED):
        token_ids += engine.tokenizer.encode(text, True)
        if len(token_ids) >= 512:
            break
    token_ids = token_ids[: min(512, engine.config.context.num_tokens)]
    floats, codes = log_probabilities(QuantConfig(), token_ids), log_probabilities(INT4, token_ids)
    kl = (floats.exp() * (floats - codes)).sum(-1).mean().item()
    assert first.num_tokens == len(token_ids) - 1 == len(floats)
    assert first.kl_mean == pytest.approx(kl, rel=1e-4)  # the engine's logarithms are float32
    assert first.top1_agreement == (floats.argmax(-1) == codes.argmax(-1)).double().mean().item()
    (warning,) = (record.getMessage() for record in caplog.records if "KL" in record.getMessage())
    assert warning.startswith("quant=int4 quant.kv_cache=int4 changes the predictions of this model: KL 0.")
    assert "more than quant.probe_kl=0" in warning

    (file,) = folder.glob("*.json")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"kl_mean": 7.0}))
    again = load().divergence  # with the default bound, which does not belong to what is measured
    assert again == replace(first, kl_mean=7.0)
    assert "KL 7 nats" in caplog.records[-1].getMessage()
    file.write_text(file.read_text()[:20])  # truncated
    assert load().divergence == first
    assert json.loads(file.read_text()) == kept
    only_cache = load(scheme=QuantScheme.none, group_size=-1).divergence
    assert only_cache is not None
    assert 0 < only_cache.kl_mean < first.kl_mean
    assert len([*folder.glob("*.json")]) == 2


def test_what_is_not_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"quant.probe_kl=0.2 .*quant.probe"):
        replace(INT4, probe=False, probe_kl=0.2)
    random = replace(RUN, model=replace(RUN.model, weights=Weights.random))
    no_tokenizer = replace(RUN, model=replace(RUN.model, tokenizer=None))
    for run in (random, no_tokenizer, replace(RUN, task=Task.bench), replace(RUN, quant=QuantConfig())):
        assert load_engine(run, 1).divergence is None
    assert load(probe=False).divergence is None
    monkeypatch.setattr(divergence, "free_memory", lambda *_: 1000)
    assert load().divergence is None
    assert "quant.probe measured nothing: the floats have" in caplog.records[-1].getMessage()
    assert not folder.exists()
    monkeypatch.undo()
    monkeypatch.setenv("QUINTET_OUTPUTS", "/proc")  # cannot be written: measured each time
    reset_peak_memory()
    before = peak_memory_bytes(torch.device("cpu"))
    monkeypatch.setattr(probe, "measure_divergence", lambda *_: (torch.ones(10**8), ProbeResult(0.1, 0.9, 7))[1])
    assert load().divergence == ProbeResult(0.1, 0.9, 7)
    assert peak_memory_bytes(torch.device("cpu")) - before < 2e8  # not the 400 MB of the probe

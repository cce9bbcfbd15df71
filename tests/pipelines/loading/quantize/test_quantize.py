"""task=quantize on Llama: the written files equal the algorithm's results and the loaded model; made models are found
again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conf.compose import dump
from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import (
    Activations,
    CalibrateConfig,
    KVCacheFormat,
    QuantConfig,
    QuantizeConfig,
    QuantizedFormat,
    QuantMethod,
    QuantScheme,
)
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import PredictConfig
from models.formats.manifest import verify_manifest
from models.layers.linear import tied_embedding
from models.tokenizers import load_tokenizer
from pipelines.loading.load_engine import load_engine
from pipelines.loading.quantize.calibration_data import read_calibration_data
from pipelines.tasks.quantize import run_quantize
from quantization.layouts.base import StoredWeight
from quantization.quantizer import Quantizer
from tests.helpers.builders import REPOSITORY, all_logits, engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.quantized_models import (
    A8W8,
    CALIBRATED,
    STATIC_CACHES,
    make,
    quantize_run,
    random_rows,
    reloaded,
    write_rows,
)
from tests.helpers.stored_head import tied

LLAMA = GOLDENS / "llama3"
STATIC_A8W8 = CALIBRATED["a8w8 static"]
PROMPT = list(range(5, 40))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, StoredWeight]:
    """Return the algorithms' results, by layer."""
    seen: dict[str, StoredWeight] = {}
    quantize = Quantizer.quantize

    def spy(self: Quantizer, *arguments: Any) -> Any:
        result = quantize(self, *arguments)
        seen.update(result[0])
        return result

    monkeypatch.setattr(Quantizer, "quantize", spy)
    return seen


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("model*.safetensors")) for name, t in load_file(file).items()}


def reports_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the report of each layer, from the metadata of the parts' files."""
    reports = {}
    for file in sorted(folder.glob("model-0*.safetensors")):
        with safe_open(file, "pt") as opened:
            reports |= {report["name"]: report for report in json.loads(opened.metadata()["reports"])}
    return reports


@pytest.mark.long
@each("name", CALIBRATED)
def test_stored_and_running_weights_are_the_chosen_ones(
    name: str, data: Path, tmp_path: Path, chosen: dict[str, StoredWeight]
) -> None:
    quant, target = CALIBRATED[name], tmp_path / "quantized"
    made = make(quantize_run(LLAMA, quant, target, data), tmp_path / "run")
    again = reloaded(target)
    assert all_logits(again, PROMPT).equal(all_logits(made, PROMPT))
    verify_manifest(target)
    tensors, config = tensors_in(target), json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {file.name for file in target.iterdir()} >= {"report.md", "model.safetensors.index.json"}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert len(chosen) == 15  # seven linear layers in each of two layers, and the head
    for layer, stored in chosen.items():
        weight = stored.weight
        layer_tensors = {key.removeprefix(f"{layer}."): t for key, t in tensors.items() if key.startswith(f"{layer}.")}
        codes = weight.codes if weight.permutation is None else weight.codes[:, weight.permutation.argsort()]
        if "weight_packed" in layer_tensors:
            bits = 4 if quant.scheme is QuantScheme.int4 and "down_proj" not in layer else 8
            unpacked = unpack_from_int32(layer_tensors["weight_packed"], bits, codes.shape)
            assert unpacked.equal(codes if weight.zero_points is None else codes - 8), layer
        else:
            assert layer_tensors["weight"].dtype == codes.dtype
            assert layer_tensors["weight"].view(torch.int8).equal(codes.view(torch.int8)), layer
        assert layer_tensors["weight_scale"].flatten().equal(weight.scales.flatten()), layer
        assert ("input_scale" in layer_tensors) == (quant.activations is Activations.static)
        if stored.input_scale is not None:
            assert layer_tensors["input_scale"].item() == stored.input_scale.item() > 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["num_layers"] == 15
    assert metrics["weight_bytes"] == again.executor.weight_bytes < metrics["weight_bytes_before"]


# Not fp8: its steps are proportional to the value, so balancing activations and weights gains nothing.
@pytest.mark.long
@each("name", [name for name, quant in CALIBRATED.items() if quant.method is not QuantMethod.rtn and name[:3] != "fp8"])
def test_a_method_beats_rounding_to_nearest(name: str, tmp_path: Path) -> None:
    """With GPTQ each layer's own error; with folds the mean of all layers, because layers without outliers differ only
    by noise."""
    write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    make(quantize_run(LLAMA, CALIBRATED[name], tmp_path / "quantized", tmp_path / "rows.jsonl"), tmp_path / "run")
    errors = [(r["rounded_error"], r["error"]) for r in reports_in(tmp_path / "quantized").values()]
    assert sum(error for _, error in errors) < sum(rounded for rounded, _ in errors)
    if "gptq" in name:
        assert all(error < rounded for rounded, error in errors)


def test_a_layer_that_nothing_reaches_is_rounded(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [[7, 7]] * 9)  # one token, which uses two of four experts in each layer
    for name in ("int4 gptq", "a8w8 static smoothquant"):
        target = tmp_path / name
        quant = replace(CALIBRATED[name], overrides={})
        run = quantize_run(GOLDENS / "mixtral", quant, target, data, num_samples=1, sequence_length=2)
        made = make(run, tmp_path / "run")
        assert all_logits(reloaded(target), PROMPT).equal(all_logits(made, PROMPT))
        notes = [r["note"] for r in reports_in(target).values() if r["error"] is None]
        assert notes
        assert all("no calibration token came here: rounded to nearest" in note for note in notes)


def test_a_tied_head_is_stored_next_to_the_embedding_that_its_codes_give(data: Path, tmp_path: Path) -> None:
    source = GOLDENS / "llama_tied_bias"
    made = make(quantize_run(source, CALIBRATED["int4 gptq"], tmp_path / "quantized", data), tmp_path / "run")
    assert json.loads((tmp_path / "quantized" / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = tensors_in(tmp_path / "quantized")
    assert "lm_head.weight_packed" in tensors
    engine = reloaded(tmp_path / "quantized")
    loaded = engine.executor.model
    assert tied_embedding(loaded.head) is loaded.embedding  # one matrix in memory
    embedding = loaded.embedding(torch.arange(loaded.embedding.shape[0]))
    assert tensors["model.embed_tokens.weight"].equal(embedding)
    before = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert 0 < (embedding - before).norm() / before.norm() < 0.15  # 4 bits
    assert all_logits(engine, PROMPT).equal(all_logits(made, PROMPT))
    kept = replace(CALIBRATED["int4 gptq"], skip=["lm_head"])
    make(quantize_run(source, kept, tmp_path / "kept", data), tmp_path / "run2")
    assert tensors_in(tmp_path / "kept")["model.embed_tokens.weight"].equal(before)


def test_a_stored_head_of_its_own_stays_one(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even if the source's config ties it."""
    source = tied(tmp_path / "source")
    quant = replace(CALIBRATED["int4 gptq"], skip=["lm_head"])
    made = make(quantize_run(source, quant, tmp_path / "quantized", data), tmp_path / "run")
    caplog.clear()
    assert all_logits(reloaded(tmp_path / "quantized"), PROMPT).equal(all_logits(made, PROMPT))
    assert not caplog.messages
    assert tensors_in(tmp_path / "quantized")["lm_head.weight"].equal(tensors_in(source)["lm_head.weight"])


def test_unread_config_keys_are_named(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "source"
    shutil.copytree(LLAMA, source)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"logit_softcap": 30.0}))
    make(quantize_run(source, CALIBRATED["a8w8 static"], tmp_path / "quantized", data), tmp_path / "run")
    assert f"the config in {source} has keys that are not used: logit_softcap" in caplog.messages


@pytest.mark.long
def test_all_zero_channels_are_fine(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(LLAMA / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensor[3] = 0
            tensor[:, 5] = 0
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_bytes((LLAMA / "config.json").read_bytes())
    schemes = "int4 gptq", "int4 awq, auto_clip", "int8 gptq, static cache", "a8w8 static smoothquant", "fp8 static"
    for i, name in enumerate(schemes):
        made = make(quantize_run(source, CALIBRATED[name], tmp_path / str(i), data), tmp_path / "run")
        logits = all_logits(made, PROMPT)
        assert logits.isfinite().all(), name
        assert all_logits(reloaded(tmp_path / str(i)), PROMPT).equal(logits), name


def test_layers_are_skipped_and_others_have_schemes_of_their_own(data: Path, tmp_path: Path) -> None:
    quant = replace(
        CALIBRATED["int4 gptq"], skip=["lm_head", "*.layers.0.self_attn.*"], overrides={"*.down_proj": "int8"}
    )
    made = make(quantize_run(LLAMA, quant, tmp_path / "quantized", data), tmp_path / "run")
    assert all_logits(reloaded(tmp_path / "quantized"), PROMPT).equal(all_logits(made, PROMPT))
    tensors = tensors_in(tmp_path / "quantized")
    assert tensors["lm_head.weight"].dtype == tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    inputs = tensors["model.layers.0.mlp.down_proj.weight_shape"][1]
    assert tensors["model.layers.0.mlp.down_proj.weight_packed"].shape[1] == inputs / 4
    assert tensors["model.layers.0.mlp.up_proj.weight_packed"].shape[1] == 64 / 8


@pytest.mark.long
def test_overwriting_and_dry_runs(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "quantized"
    run = quantize_run(LLAMA, STATIC_A8W8, target, data)
    dry = replace(run, quantize=replace(run.quantize, dry_run=True))
    run_quantize(dry, tmp_path / "run", dump)
    printed = " ".join(capsys.readouterr().out.split())
    assert "15 layers int8 per channel, static activations" in printed
    assert "stay floats no linear layer" in printed
    run_quantize(replace(dry, quant=QuantConfig(**STATIC_CACHES["int8, static"])), tmp_path / "run", dump)
    printed = " ".join(capsys.readouterr().out.split())
    assert "KV cache int8, a scale for each head" in printed
    assert "layers int8" not in printed
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl"}  # nothing is left
    run_quantize(run, tmp_path / "run", dump)
    assert (target / "errors.png").read_bytes()[1:4] == b"PNG"
    assert (
        "| model.layers.0.self_attn.q_proj | int8 per channel, static activations |"
        in (target / "report.md").read_text()
    )
    before = (target / "manifest.json").read_bytes()
    with pytest.raises(
        UserError, match=r"quantize.output=.*quantized exists: give another folder, or quantize.overwrite"
    ):
        run_quantize(replace(run, quant=CALIBRATED["int4 gptq"]), tmp_path / "run", dump)
    assert (target / "manifest.json").read_bytes() == before
    other = replace(run, quant=CALIBRATED["int4 gptq"], quantize=QuantizeConfig(output=str(target), overwrite=True))
    make(other, tmp_path / "run")
    assert "lm_head.weight_packed" in tensors_in(target)
    verify_manifest(target)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.fixture
def made_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of models without a name."""
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    return tmp_path / "quantized"


def predict_run(folder: Path, quant: QuantConfig, data: Path, **calibrate: int) -> RunConfig:
    run = quantize_run(folder, quant, None, data, **calibrate)
    return replace(run, task=Task.predict, quantize=QuantizeConfig())


def test_a_made_model_is_found_again(
    data: Path, tmp_path: Path, made_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_engine(predict_run(LLAMA, STATIC_A8W8, data), 3)
    (folder,) = made_folder.iterdir()
    assert folder.name.startswith("llama3-a8w8-rtn-")
    monkeypatch.setattr("pipelines.loading.quantize.share.Quantizer", None)  # must not calibrate again
    again = load_engine(predict_run(LLAMA, STATIC_A8W8, data), 3)
    with_cache = replace(STATIC_A8W8, kv_cache=KVCacheFormat.int8)
    cached = load_engine(predict_run(LLAMA, with_cache, data), 3)
    assert list(made_folder.iterdir()) == [folder]
    assert all_logits(first, PROMPT).equal(all_logits(again, PROMPT))
    assert not all_logits(first, PROMPT).equal(all_logits(cached, PROMPT))


def test_settings_that_determine_the_codes_determine_the_folder(data: Path, tmp_path: Path, made_folder: Path) -> None:
    def names(*runs: RunConfig) -> set[str]:
        for run in runs:
            load_engine(run, 3)
        return {folder.name for folder in made_folder.iterdir()}

    run = predict_run(LLAMA, STATIC_A8W8, data)
    other_text = write_rows(tmp_path / "other.jsonl", random_rows(31, 16))
    copied = tmp_path / "llama3"
    copied.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copied / name).write_bytes((LLAMA / name).read_bytes())
    runs = [
        run,
        replace(run, calibrate=replace(run.calibrate, seed=1)),
        replace(run, calibrate=replace(run.calibrate, num_samples=5)),
        replace(run, calibrate=replace(run.calibrate, data=str(other_text))),
        replace(run, quant=replace(run.quant, skip=["lm_head"])),
        replace(run, model=replace(run.model, max_length=12)),
        predict_run(copied, STATIC_A8W8, data),
    ]
    assert len(names(*runs)) == len(runs)
    moved = data.rename(tmp_path / "moved.jsonl")
    assert len(names(predict_run(LLAMA, STATIC_A8W8, moved))) == len(runs)


def test_a_quantised_model_needs_no_option_and_takes_its_own(
    data: Path, tmp_path: Path, made_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(quantize_run(LLAMA, STATIC_A8W8, tmp_path / "a8w8", data), tmp_path / "run")
    expected = all_logits(reloaded(tmp_path / "a8w8"), PROMPT)
    run = replace(run_config(tmp_path / "a8w8"), quant=STATIC_A8W8)
    assert all_logits(load_engine(run, 3), PROMPT).equal(expected)
    assert not made_folder.exists()
    message = (
        "quant=int8 contradicts the checkpoint, .* is int8 per channel, static activations there, not int8 per channel:"
    )
    with pytest.raises(UserError, match=message):
        load_engine(replace(run, quant=QuantConfig(QuantScheme.int8)), 3)
    warn_once.cache_clear()
    dynamic = replace(run, quant=QuantConfig(A8W8, activations=Activations.dynamic))
    assert all_logits(load_engine(dynamic, 3), PROMPT).equal(expected)
    assert "scales of activations are static, and are used: quant.activations=dynamic is not" in caplog.text
    with pytest.raises(UserError, match="quant=fp8 contradicts the checkpoint"):
        load_engine(replace(run, quant=QuantConfig(QuantScheme.fp8, activations=Activations.dynamic)), 3)
    with pytest.raises(UserError, match="lm_head is int8 per channel, static activations there, not a float"):
        load_engine(replace(run, quant=replace(STATIC_A8W8, skip=["lm_head"])), 3)
    with pytest.raises(UserError, match="quant.skip has 'nothing', which matches no layer"):
        load_engine(replace(run, quant=replace(STATIC_A8W8, skip=["nothing"])), 3)
    for unused in ({"calibrate": CalibrateConfig(seed=3)}, {"quantize": QuantizeConfig(format=QuantizedFormat.gptq)}):
        with pytest.raises(
            UserError, match="calibrate and quantize.format are not used by a model that is quantised already"
        ):
            load_engine(replace(run, **unused), 3)  # type: ignore[arg-type]


@pytest.mark.long
def test_texts_of_its_own_serve_where_none_are_given(chatty: Path, tmp_path: Path, made_folder: Path) -> None:
    made = make(quantize_run(chatty, STATIC_A8W8, None, None, tokenizer=""), tmp_path / "run")
    (folder,) = made_folder.iterdir()
    assert "from the built-in texts (short stories and questions" in (folder / "report.md").read_text()
    run = RunConfig(model=ModelConfig(str(folder)), predict=PredictConfig(batch_size=3))
    engine = load_engine(run, 3)
    assert engine.tokenizer is not None
    assert all_logits(engine, PROMPT).equal(all_logits(made, PROMPT))
    exact = all_logits(engine_of(chatty), PROMPT)
    assert (all_logits(made, PROMPT) - exact).norm() < 0.2 * exact.norm()  # steps of 1/127, over two random layers


def test_rows_of_evaluate_are_rows_of_calibration(tmp_path: Path) -> None:
    """A "text" is a prompt, as lines, columns and a table."""
    tokenizer, texts = (
        load_tokenizer(REPOSITORY / "models" / "tiny"),
        [f"Once upon a time there were {i} cats." for i in range(99)],
    )

    def samples(name: str, content: str) -> list[list[int]]:
        (tmp_path / name).write_text(content)
        config = CalibrateConfig(str(tmp_path / name), num_samples=4, sequence_length=16, seed=1)
        return read_calibration_data(config, tokenizer, 16, are_prompts=False).samples

    expected = samples("a.jsonl", "".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    assert samples("b.jsonl", "".join(json.dumps({"text": text, "id": "x"}) + "\n" for text in texts)) == expected
    assert samples("c.csv", "text\n" + "".join(f"{text}\n" for text in texts)) == expected
    assert samples("d.json", json.dumps({"text": texts})) == expected
    both = "".join(json.dumps({"text": "x", "prompt": text, "src": None}) + "\n" for text in texts)
    assert samples("f.jsonl", both) == expected
    with pytest.raises(UserError, match="row 0 of calibrate.data=.*the row has none of prompt, messages"):
        samples("e.jsonl", '{"txt": "a"}\n')

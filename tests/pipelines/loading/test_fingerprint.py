"""A job's fingerprint: contents, not paths, and no setting that leaves its rows unchanged."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig, QuantizedFormat, QuantMethod, QuantScheme
from conf.schema import RunConfig
from pipelines.jobs.prompts import read_prompts
from pipelines.loading.fingerprint import common_fingerprint, fingerprint
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from tests.helpers.builders import run_config, write_llama
from tests.helpers.gguf_files import write_twin


def of(run: RunConfig) -> dict[str, Any]:
    return fingerprint(run, resolve_model(run.model), load_engine(run, 2))


def test_parts_have_the_names_of_the_config_and_of_the_files(chatty: Path) -> None:
    parts = of(run_config(chatty))
    assert parts["model.dtype"] == "float32"
    assert parts["device.type"] == "cpu"
    assert (parts["quant"]["scheme"], parts["quant"]["kv_cache"]) == ("none", "none")
    assert "sparsity" not in parts["quant"]  # journals of older versions lack it
    assert (parts["decode.seed"], parts["decode.stop"]) == (None, [])
    assert parts["model/model.safetensors"].startswith(f"{(chatty / 'model.safetensors').stat().st_size} bytes of ")
    assert {"model/config.json", "model/tokenizer.json", "model/tokenizer_config.json"} <= parts.keys()
    assert not [name for name in parts if "batch" in name or "threads" in name or "resume" in name]


def test_machines_have_equal_weights_whenever_they_were_written(chatty: Path, tmp_path: Path) -> None:
    """A weight that was trained further has other numbers nearly everywhere, in a file of the same size."""
    copies = [shutil.copytree(chatty, tmp_path / name) for name in ("as it is", "trained", "longer")]
    weights = [copy / "model.safetensors" for copy in copies]
    content = weights[0].read_bytes()
    middle = len(content) // 2
    weights[1].write_bytes(
        content[:middle] + bytes(255 - byte for byte in content[middle : middle + 9999]) + content[middle + 9999 :]
    )
    weights[2].write_bytes(content + b"\0")
    os.utime(weights[0], (1, 1))
    original, *others = (common_fingerprint(folder) for folder in (chatty, *copies))
    differing = [[name for name in original if original[name] != other[name]] for other in others]
    assert differing == [[], ["model/model.safetensors"], ["model/model.safetensors"]]


def test_as_many_new_tokens_as_fit_are_not_number(chatty: Path) -> None:
    run = run_config(chatty)
    run = replace(run, decode=replace(run.decode, max_new_tokens="auto"))
    assert of(run)["decode.max_new_tokens"] == "auto"


def test_a_template_is_what_it_says(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(content)
    sums = []
    for path in (str(tmp_path / "a"), "~/a", str(tmp_path / "b"), str(tmp_path / "c")):
        run = run_config(chatty)
        parts = of(replace(run, predict=replace(run.predict, chat_template=path)))
        sums.append(parts["predict.chat_template"])
    assert sums[0] == sums[1] == sums[2] != sums[3]


def test_a_tokenizer_of_its_own_is_a_part(chatty: Path, tmp_path: Path) -> None:
    run = run_config(chatty)
    subprocess.run(["cp", "-a", str(chatty), str(tmp_path / "other")], check=True)
    original, other, none = (
        of(replace(run, model=replace(run.model, tokenizer=tokenizer)))
        for tokenizer in ("", str(tmp_path / "other"), None)
    )
    assert "tokenizer/tokenizer.json" in other.keys() - original.keys()
    assert [parts["model.tokenizer"] for parts in (original, other, none)] == [True, True, False]


def test_a_calibrated_model_is_its_texts_and_its_layout(chatty: Path, tmp_path: Path) -> None:
    run, texts = replace(run_config(chatty), quant=QuantConfig(QuantScheme.int8, QuantMethod.gptq)), tmp_path / "a.txt"
    texts.write_text("Once")
    engine = load_engine(run_config(chatty), 2)

    def parts(**changes: Any) -> dict[str, Any]:
        options = {"calibrate": CalibrateConfig(str(texts)), **changes}
        return fingerprint(replace(run, **options), resolve_model(run.model), engine)

    before = parts()
    texts = texts.rename(tmp_path / "b.txt")
    assert parts() == before
    assert parts(quantize=QuantizeConfig(format=QuantizedFormat.gptq)) != before
    texts.write_text("Twice")
    assert parts() != before
    assert parts(quant=QuantConfig(), calibrate=CalibrateConfig()).keys() == before.keys() - {
        "calibrate",
        "quantize.format",
    }


def test_equal_prompts_are_equal_input(tmp_path: Path) -> None:
    file = tmp_path / "rows.txt"
    file.write_text("Once\n")
    assert read_prompts(str(file)).sha256 == read_prompts(str(file.rename(tmp_path / "moved.txt"))).sha256
    assert read_prompts("Once").sha256 != read_prompts("Twice").sha256


def test_weights_in_folders_of_ranks_are_parts(chatty: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(chatty, folder)
    (folder / "rank_0").mkdir()
    (folder / "model.safetensors").rename(folder / "rank_0" / "model.safetensors")
    assert of(run_config(folder))["model/rank_0/model.safetensors"].endswith(
        f" bytes of {(folder / 'rank_0' / 'model.safetensors').stat().st_mtime_ns}"
    )


def test_a_model_in_one_file_is_a_part(tmp_path: Path) -> None:
    write_llama(tmp_path)
    file = write_twin(tmp_path, tmp_path / "x.gguf")
    parts = of(run_config(file))
    assert [name for name in parts if name.startswith("model/")] == ["model/x.gguf"]
    assert parts["model/x.gguf"].startswith(f"{file.stat().st_size} bytes of ")
    os.utime(file, ns=(0, 0))
    assert of(run_config(file))["model/x.gguf"] != parts["model/x.gguf"]

"""Unsupported requests of `task=convert` are refused in one line and leave no files."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig, Task, Weights
from conf.tasks import CheckpointFormat, ConvertConfig, ConvertDType
from pipelines.tasks.convert import run_convert
from tests.helpers.cases import each
from tests.helpers.command import refusal
from tests.helpers.conversion import SHARDED, contents, convert, names
from tests.helpers.huggingface_files import make_tensors, write_whole


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("source"), make_tensors())


def refused(source: Path, tmp_path: Path, message: str, target: str = "made/hf", **settings: Any) -> None:
    """Check that the run fails with this message and leaves no files."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message) as caught:
        convert(source, tmp_path / target, **settings)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_target_is_replaced_only_where_asked_for(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "made", max_shard_size="20KB")
    shutil.rmtree(tmp_path / "made-run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("not a model")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "made")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    exists = r"exists: give another folder, or convert\.overwrite=true to replace it"
    for name in ("made", "notes", "file", "link", "dangling"):
        refused(source, tmp_path, exists, name)
    for name in ("notes", "file", "link", "dangling"):
        refused(source, tmp_path, "is not the folder of a model, which alone is replaced", name, overwrite=True)
    convert(source, tmp_path / "made", overwrite=True)
    assert names(tmp_path / "made") == {"config.json", "manifest.json", "model.safetensors"}
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", overwrite=True)


def test_the_source_is_never_touched(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "a" / "source")
    (tmp_path / "link").symlink_to(folder)
    before = contents(folder)
    for target in ("a/source", "a/source/inside", "a", ".", "link", "link/inside", "a/x/../source"):
        refused(folder, tmp_path, "is the source", target, overwrite=True)
    with pytest.raises(UserError, match="is or holds the run's own folder"):
        run_convert(RunConfig(Task.convert, ModelConfig(str(folder)), convert=ConvertConfig(str(tmp_path / "out"))),
                    tmp_path / "out" / "x", dump)  # fmt: skip
    assert contents(folder) == before


def test_sources_that_cannot_be_converted(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    bad = write_whole(tmp_path / "bad", make_tensors(), quantization_config={"quant_method": "gptq"})
    for settings in ({"dtype": ConvertDType.bfloat16}, {"lora": "adapter"}, {"format": CheckpointFormat.gguf}):
        (name,) = settings
        refused(bad, tmp_path, rf"convert\.{name}=\w+ needs floats, but .* is quantised: give the float", **settings)
    write_whole(bad, {name: tensor.to(torch.int8) for name, tensor in make_tensors().items()})
    refused(bad, tmp_path, "is torch.int8, but its layer is not quantised")
    write_whole(bad, make_tensors(), num_hidden_layers=3)
    refused(bad, tmp_path, "does not hold the model that its config describes: missing: model.layers.2")
    write_whole(bad, make_tensors(), model_type="nonesuch")
    refused(bad, tmp_path, "model_type='nonesuch' is not supported")
    (bad / "model.safetensors").unlink()
    write_whole(bad, {})
    (bad / "model.safetensors").unlink()
    refused(bad, tmp_path, "has no weights")
    refused(tmp_path / "nowhere", tmp_path, "there is no folder .*nowhere")
    refused(source, tmp_path, "pp=3 is more than the model's 2 layers", format=SHARDED, pp=3)
    refused(source, tmp_path, "tp=7 is more than the 4 query heads of this model: give at most 4", format=SHARDED, tp=7)


def test_options_of_other_tasks(source: Path, tmp_path: Path) -> None:
    run = RunConfig(Task.convert, ModelConfig(str(source)), convert=ConvertConfig(output=str(tmp_path / "made")))
    others: list[tuple[dict[str, Any], str]] = [
        (
            {"quant": QuantConfig(QuantScheme.int8)},
            "quant.scheme=int8 is not used by task=convert: give task=quantize, or conv",
        ),
        ({"quant": QuantConfig(kv_cache=KVCacheFormat.int8)}, "quant.kv_cache=int8 is not used by .*: leave it out"),
        ({"device": DeviceConfig(DeviceType.cuda)}, "device.type=cuda is not used by task=convert: leave it out"),
        ({"device": DeviceConfig(DeviceType.cpu, threads=1)}, "device.threads=1 is not used by task=convert: leave"),
        (
            {"decode": DecodeConfig(max_new_tokens=5)},
            "decode.max_new_tokens=5 is not used by task=convert: leave it out",
        ),
    ]
    for other, message in others:
        with pytest.raises(UserError, match=message):
            run_convert(replace(run, **other), tmp_path / "run", dump)
    assert not (tmp_path / "made").exists()


@each(
    ("model", "message"),
    [
        ({"dtype": DType.bfloat16}, r"model\.dtype=bfloat16 is not used by task=convert: give convert\.dtype"),
        ({"weights": Weights.random}, r"model\.weights=random is not used by task=convert"),
        ({"tokenizer": None}, r"model\.tokenizer=null is not used by task=convert: its files are copied as they are"),
        ({"max_length": 5}, r"model\.max_length=5 is not used by task=convert"),
        ({"keep_packed": True}, r"model\.keep_packed=true is not used by task=convert: leave it out"),
        ({"verify": True}, r"model\.verify=true, but .* has no manifest\.json"),
    ],
)
def test_unused_settings(source: Path, tmp_path: Path, model: dict[str, Any], message: str) -> None:
    refused(source, tmp_path, message, model=model)


@each(
    ("settings", "message"),
    [
        ({"output": ""}, r"convert\.output='' is not allowed"),
        ({"tp": 0, "format": SHARDED}, r"convert\.tp=0 is not allowed: give a number from 1"),
        ({"pp": -1, "format": SHARDED}, r"convert\.pp=-1 is not allowed"),
        ({"tp": 2}, r"convert\.tp=2 is not used by convert\.format=hf: leave it at 1, or give convert.format=sharded"),
        ({"pp": 2}, r"convert\.pp=2 is not used by convert\.format=hf"),
        ({"max_shard_size": "1GB", "format": SHARDED}, r"convert\.max_shard_size=1GB is not used by .*=sharded"),
        *[({"max_shard_size": size}, rf"max_shard_size='{size}' is not allowed: give a size such as 500MB")
          for size in ("", "0", "-5MB", "5XB", "GB", "0.1", "1e9", "inf", "nan", "5 5MB")],
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConvertConfig(**settings)


@each(
    ("size", "expected"),
    [("5GB", 5 * 10**9), ("500MB", 500 * 10**6), ("500mb", 500 * 10**6), ("2GiB", 2 * 2**30), ("1.5 KB", 1500),
     ("4096", 4096), ("7B", 7), ("1TB", 10**12), ("3M", 3 * 10**6)],
)  # fmt: skip
def test_sizes(size: str, expected: int) -> None:
    assert ConvertConfig(max_shard_size=size).max_shard_bytes == expected


@pytest.mark.long
@each(
    ("arguments", "message"),
    [
        (["convert.outptu=x"], r"Key 'outptu' not in 'ConvertConfig'.*there are output, format, tp"),
        (["convert.format=gguff"], "gguff"),
        (["convert.tp=two"], "two"),
        (["convert.tp=2"], "convert.tp=2 is not used by convert.format=hf"),
        (["convert.max_shard_size=5XB"], "convert.max_shard_size='5XB' is not allowed: give a size such as 500MB"),
        ([], "convert.output is missing: give the folder to make"),
        (["predict.batch_size=3"], "predict.batch_size=3 is not used by task=convert"),
    ],
)
def test_typos_on_the_command_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert re.search(message, refusal(tmp_path / "run", "task=convert", *arguments))

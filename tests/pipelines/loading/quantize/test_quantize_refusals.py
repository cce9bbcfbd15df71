"""Unsupported requests of task=quantize and unsupported quantised files are one clear error each."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.compose import dump
from conf.errors import UserError
from conf.quantization import Activations, CalibrateConfig, KVCacheFormat, QuantConfig
from conf.schema import DType, RunConfig, Weights
from pipelines.tasks.quantize import run_quantize
from tests.helpers.builders import engine_of
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.quantized_models import CALIBRATED, INT4, SHIFT, make, quantize_run, random_rows, write_rows

LLAMA = GOLDENS / "llama3"
STATIC = CALIBRATED["a8w8 static"]


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    data = write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    return quantize_run(LLAMA, STATIC, tmp_path / "made", data)


def refused(run: RunConfig, tmp_path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_quantize(run, tmp_path / "run", dump)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "run").exists()


def text(content: bytes) -> Callable[[RunConfig, Path], RunConfig]:
    def change(run: RunConfig, folder: Path) -> RunConfig:
        (folder / "text.txt").write_bytes(content)
        return replace(run, calibrate=replace(run.calibrate, data=str(folder / "text.txt")))

    return change


def kept(run: RunConfig, _: Path) -> RunConfig:
    return replace(run, model=replace(run.model, keep_packed=True))


def random(run: RunConfig, _: Path) -> RunConfig:
    return replace(run, model=replace(run.model, weights=Weights.random))


def with_(**groups: Any) -> Callable[[RunConfig, Path], RunConfig]:
    return lambda run, _: replace(run, **groups)


@each(
    ("change", "message"),
    [
        (with_(quant=QuantConfig()),
         "quant=none is not allowed: give int8, int4, a8w8, fp8, mxfp4 or nvfp4 with task=quantize, quant.kv_cache_scales=static"),
        (with_(quant=replace(STATIC, kv_cache=KVCacheFormat.int8)),
         "quant.kv_cache=int8 is not allowed: give none with task=quantize .*, or quant.kv_cache_scales=static"),
        (with_(quant=QuantConfig(INT4, activations=Activations.auto)),
         "quant.activations=auto is not allowed: give none with task=quantize and give it when the model is used"),
        (kept, "model.keep_packed=true is not allowed: give false with task=quantize and give it when the model is used"),
        (random, "model.weights=random has nothing to calibrate: leave it out, or give quant.method=rtn with dynamic activations, which"),
        (with_(quant=replace(STATIC, skip=["*"])), "quant=a8w8 quantises none of 15 layers: skip fewer layers"),
        (with_(quant=replace(STATIC, skip=["*.k_prj"])), "quant.skip has '[*].k_prj', which matches no layer: there are"),
        (with_(quant=QuantConfig(INT4, group_size=32)), "down_proj has 176 input channels, which groups of 32 do not divide: give a quant"),
        (with_(quant=SHIFT), "quant.shift needs norms and linear layers with biases, as BLOOM, GPT-2 and OPT have, but .* has none"),
        (with_(calibrate=CalibrateConfig("no/such.txt")), "calibrate.data=no/such.txt is not a file: give a .txt or a .jsonl"),
        (with_(calibrate=CalibrateConfig()), "calibration needs a tokenizer, or calibrate.data with prompt_token_ids"),
        (text(b"Once upon a time"), "calibrate.data=.*text.txt: .*tokenizer"),
        (text("Früh".encode("latin-1")), "text.txt.* not UTF-8"),
        (lambda run, _: replace(run, calibrate=replace(run.calibrate, num_samples=200)),
         "calibrate.data has 20 samples of 16 tokens, but calibrate.num_samples=200 and 8 for the report are wanted: give more text"),
        (lambda run, _: replace(run, device=replace(run.device, max_batched_tokens=8)), "a sample of 16 tokens is more than device.max"),
    ],
)  # fmt: skip
def test_bad_input(
    change: Callable[[RunConfig, Path], RunConfig], message: str, run: RunConfig, tmp_path: Path
) -> None:
    refused(change(run, tmp_path), tmp_path, message)


def copy_of(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(folder, target)
    for file in target.glob("model*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    return target


@each("value", [float("nan"), float("inf"), -float("inf")])
@each("scheme", ["a8w8 static", "int4 gptq", "int8 gptq, static cache"])
def test_weights_that_are_not_finite(scheme: str, value: float, run: RunConfig, tmp_path: Path) -> None:
    """Also if no token uses them: a row of the embedding that no sample has."""
    names = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name][0, 0] = value

    damaged = copy_of(LLAMA, tmp_path / "damaged", damage)
    run = replace(run, model=replace(run.model, path=str(damaged)), quant=CALIBRATED[scheme])
    refused(run, tmp_path, f"the weights hold NaN or infinite numbers: {', '.join(names)}: the files are damaged")


def test_weights_that_are_finite_only_in_their_own_dtype(run: RunConfig, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    large = copy_of(LLAMA, tmp_path / "large", lambda tensors: tensors[name][0].fill_(1e6))
    run = replace(run, model=replace(run.model, path=str(large), dtype=DType.float16))
    refused(run, tmp_path, f"infinite numbers: {name}: .* exceed the range of model.dtype=float16")


def test_a_model_that_is_quantised_already(run: RunConfig, tmp_path: Path) -> None:
    make(run, tmp_path / "run")
    again = replace(run, model=replace(run.model, path=str(tmp_path / "made")))
    for dry_run in (False, True):
        with pytest.raises(UserError, match=r"model.path=.*made is quantised already: give the float model"):
            run_quantize(replace(again, quantize=replace(run.quantize, dry_run=dry_run)), tmp_path / "again", dump)


Q = "model.layers.0.self_attn.q_proj"


def pop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name, None)


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: value(tensors[name]).contiguous()} if name in tensors else {})


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pop(f"{Q}.weight_scale"), f"missing: {Q}.weight_scale"),
        (pop(f"{Q}.input_scale"), f"missing: {Q}.input_scale"),
        (put(f"{Q}.weight_scale", lambda t: t[:-1]), rf"wrong shape: {Q}.weight_scale \[63, 1\], expected \[64, 1\]"),
        (put(f"{Q}.weight", lambda t: t[:, :-1]), rf"wrong shape: {Q}.weight \[64, 63\]"),
        (put(f"{Q}.weight", lambda t: t.int()), f"{Q}: weight is torch.int32, expected torch.int8"),
        (put(f"{Q}.weight_scale", lambda t: t / 0), f"{Q}: weight_scale has values that are not finite"),
        (put(f"{Q}.weight_scale", lambda t: t * float("nan")), f"{Q}: weight_scale has values that are not finite"),
        (put(f"{Q}.input_scale", lambda t: -t), f"{Q}: input_scale has values that are not finite numbers above 0"),
    ],
)  # fmt: skip
def test_damaged_files(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, run: RunConfig, tmp_path: Path
) -> None:
    make(run, tmp_path / "run")
    with pytest.raises(UserError, match=message):
        engine_of(copy_of(tmp_path / "made", tmp_path / "damaged", change))


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "quip"}, "quant_method='quip' is not supported"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"config_groups": {}}, "config_groups is empty"),
        ({"sparsity_config": {"format": "marlin-24"}}, "sparsity_config"),
        ({"surprise": 3}, "surprise"),
    ],
)
def test_unknown_configs(change: dict[str, Any], message: str, run: RunConfig, tmp_path: Path) -> None:
    make(run, tmp_path / "run")
    file = tmp_path / "made" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path / "made")

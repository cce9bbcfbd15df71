"""`quantize.format`: the same codes in other tools' layouts, which load as the same model."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conf.compose import dump
from conf.errors import UserError
from conf.quantization import GptqConfig, QuantConfig, QuantizedFormat, QuantScheme, SparsityConfig, SparsityMethod
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.quantize import run_quantize
from quantization.layouts.packing import unpack
from tests.helpers.builders import all_logits, run_config
from tests.helpers.cases import each
from tests.helpers.quantized_models import (
    A8W8,
    AWQ,
    DYNAMIC,
    FP8,
    GPTQ,
    INT4,
    INT8,
    STATIC,
    STATIC_CACHES,
    make,
    quantize_run,
    random_rows,
    reloaded,
    write_rows,
)

LLAMA = Path(__file__).resolve().parents[3] / "goldens" / "llama3"
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# Sizes that groups of 32 do not divide, and the head, which AWQ's files do not quantise.
LAYERS: dict[str, Any] = {"group_size": 32, "skip": ["lm_head", "*.down_proj"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))


@pytest.mark.long
@each(
    ("format", "quant"),
    [
        (QuantizedFormat.awq, QuantConfig(INT4, AWQ, **LAYERS)),
        (QuantizedFormat.awq, QuantConfig(INT4, AWQ, **LAYERS, symmetric=False)),
        (QuantizedFormat.gptq, QuantConfig(INT4, GPTQ, **LAYERS)),
        (QuantizedFormat.gptq, QuantConfig(INT4, GPTQ, **LAYERS, symmetric=False)),
        (QuantizedFormat.gptq, QuantConfig(INT4, GPTQ, **LAYERS, gptq=GptqConfig(static_groups=False))),
        (QuantizedFormat.compressed_tensors, QuantConfig(QuantScheme.mxfp4)),
        (QuantizedFormat.compressed_tensors, QuantConfig(QuantScheme.nvfp4, overrides={"lm_head": "none"})),
    ],
)
def test_it_reloads_to_the_same_bits(format: QuantizedFormat, quant: QuantConfig, data: Path, tmp_path: Path) -> None:
    run = quantize_run(LLAMA, quant, tmp_path / "made", data, format=format)
    made = make(run, tmp_path / "run")
    assert all_logits(reloaded(tmp_path / "made"), PROMPT).equal(all_logits(made, PROMPT))
    named = load_engine(replace(run_config(tmp_path / "made"), quant=quant), 3)  # its own option contradicts nothing
    assert all_logits(named, PROMPT).equal(all_logits(made, PROMPT))


def test_the_options_own_scheme_of_the_head_is_none_of_awq(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """conf/quant/int4.yaml has the head in int8; a request for another scheme of the head is refused."""
    quant = QuantConfig(INT4, group_size=32, skip=["*.down_proj"], overrides={"lm_head": "int8"})
    run = quantize_run(LLAMA, quant, tmp_path / "made", data, format=QuantizedFormat.awq)
    run_quantize(run, tmp_path / "run", dump)
    assert "quantize.format=awq has no quantised head: lm_head stays as it is" in caplog.text
    kept = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in kept
    other = replace(run, quant=replace(quant, overrides={"lm_head": "int4"}))
    with pytest.raises(UserError, match="AWQ holds one scheme for all layers|AWQ has no quantised head"):
        run_quantize(replace(other, quantize=replace(run.quantize, overwrite=True)), tmp_path / "run", dump)


def test_int8_for_vllm_on_a_cpu_has_dynamic_activations_and_a_named_head(data: Path, tmp_path: Path) -> None:
    """The codes and scales are the same as without it; the model that is made, measured and loaded quantises
    activations as vLLM does."""
    runs = {
        format: quantize_run(LLAMA, QuantConfig(INT8), tmp_path / format.name, data, format=format)
        for format in (QuantizedFormat.vllm_cpu, QuantizedFormat.compressed_tensors)
    }
    made, plain = (all_logits(make(run, tmp_path / "run"), PROMPT) for run in runs.values())
    assert not made.equal(plain)
    files = {format: load_file(tmp_path / format.name / "model-00000.safetensors") for format in runs}
    for name, packed in files[QuantizedFormat.compressed_tensors].items():
        if name.endswith("weight_packed"):
            codes = files[QuantizedFormat.vllm_cpu][name.replace("weight_packed", "weight")]
            assert unpack(packed, 8, codes.shape[1]).equal(codes)
    config = json.loads((tmp_path / "vllm_cpu" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert config["format"] == "int-quantized"
    assert group["targets"] == ["Linear", "lm_head"]
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    assert all_logits(reloaded(tmp_path / "vllm_cpu"), PROMPT).equal(made)
    for quant, message in ((QuantConfig(A8W8, activations=DYNAMIC), None), (QuantConfig(INT8), "contradict|int8")):
        run = replace(run_config(tmp_path / "vllm_cpu"), quant=quant)
        with pytest.raises(UserError, match=message) if message else nullcontext():
            assert all_logits(load_engine(run, 3), PROMPT).equal(made)


def test_int4_for_vllm_on_a_cpu_keeps_float_activations_but_for_its_int8_head(data: Path, tmp_path: Path) -> None:
    quant = QuantConfig(INT4, group_size=32, skip=["*.down_proj"], overrides={"lm_head": "int8"})
    run = quantize_run(LLAMA, quant, tmp_path / "made", data, format=QuantizedFormat.vllm_cpu)
    made = make(run, tmp_path / "run")
    groups = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]["config_groups"]
    messages = [
        (g["targets"], g["format"], g["weights"]["num_bits"], bool(g["input_activations"])) for g in groups.values()
    ]
    assert messages == [(["Linear"], "pack-quantized", 4, False), (["lm_head"], "int-quantized", 8, True)]
    assert all_logits(reloaded(tmp_path / "made"), PROMPT).equal(all_logits(made, PROMPT))


@each(
    ("format", "quant", "message"),
    [
        (
            QuantizedFormat.awq,
            QuantConfig(INT8),
            "AWQ holds int4 weights, not int8 per channel: give quantize.format=compressed_tensors",
        ),
        (
            QuantizedFormat.compressed_tensors,
            QuantConfig(INT8, overrides={"*.v_proj": "q4_1"}),
            "Q4_1 is a type of llama.cpp, which no quantize.format holds: give int8, int4, mxfp4 or nvfp4",
        ),
        (QuantizedFormat.vllm_cpu, QuantConfig(QuantScheme.mxfp4), "MXFP4, which vLLM does not support on a CPU"),
        (QuantizedFormat.gptq, QuantConfig(QuantScheme.nvfp4), "GPTQ holds int4 and int8 weights, not "),
        (QuantizedFormat.awq, QuantConfig(INT4), r"AWQ has no quantised head: give quant.skip=\[lm_head\]"),
        (
            QuantizedFormat.vllm_cpu,
            QuantConfig(INT8, group_size=32, skip=["*.down_proj"]),
            "supports int8 only per channel: leave quant.group_size out",
        ),
        (
            QuantizedFormat.vllm_cpu,
            QuantConfig(FP8, activations=STATIC),
            "fp8 per channel, static activations, but vLLM on a CPU",
        ),
        (
            QuantizedFormat.vllm_cpu,
            QuantConfig(FP8, activations=DYNAMIC, per_tensor=True),
            "give quant.per_tensor=false",
        ),
        (QuantizedFormat.vllm_cpu, QuantConfig(INT4), r"int4 only for multiples of 32: give quant.skip=\["),
        (
            QuantizedFormat.vllm_cpu,
            QuantConfig(INT4, GPTQ, **LAYERS, gptq=GptqConfig(static_groups=False)),
            "give quant.gptq.static_groups=true",
        ),
        (
            QuantizedFormat.vllm_cpu,
            QuantConfig(INT8, **STATIC_CACHES["int8, static"]),
            "quantize.format=vllm_cpu has no scales of the KV cache: give compressed_tensors",
        ),
        (
            QuantizedFormat.vllm_cpu,
            QuantConfig(INT8, sparsity=SparsityConfig(SparsityMethod.wanda)),
            "quantize.format=vllm_cpu does not say that weights are pruned: give compressed_tensors, or leave quant.spars",
        ),
    ],
)
def test_schemes_that_a_layout_cannot_store(
    format: QuantizedFormat, quant: QuantConfig, message: str, data: Path, tmp_path: Path
) -> None:
    run = quantize_run(LLAMA, quant, tmp_path / "made", data, format=format)
    for dry_run in (False, True):
        with pytest.raises(UserError, match=message):
            make(replace(run, quantize=replace(run.quantize, dry_run=dry_run)), tmp_path / "run")
    assert not (tmp_path / "made").exists()

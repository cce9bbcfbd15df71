"""Adapters of the float model on models with folded scales (AWQ and SmoothQuant), with the scale vectors in the
files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig, QuantizedFormat, SmoothConfig
from models.linear_layers import linear_layer
from pipelines import pipeline
from pipelines.engine import Engine
from pipelines.loading.quantize.layers import calibration_batches
from quantization.calibration import SequentialCalibrator
from quantization.plan import float_weight, plan
from quantization.quantizer import is_sequential, parts_of
from quantization.smoothing import Smoother
from quantization.smoothing_record import FOLDS, add_folds, fold_tensors
from tests.helpers.adapters import ALL_LINEAR, load_with, peft_logprobs, peft_model, write_adapter
from tests.helpers.builders import run_config, unpacked_engine, weights_of, write_llama, write_random
from tests.helpers.cases import each
from tests.helpers.conversion import convert
from tests.helpers.quantized_models import (
    A8W8,
    AWQ,
    CALIBRATED,
    INT4,
    SMOOTHQUANT,
    STATIC,
    make,
    quantize_run,
    random_rows,
    write_rows,
)

PROMPT = [token % 60 + 3 for token in range(30)]
METHODS = {
    "smoothquant": QuantConfig(A8W8, SMOOTHQUANT, activations=STATIC, smooth=SmoothConfig(alpha=0.8)),
    "awq": QuantConfig(INT4, AWQ, group_size=32),
}
SMALL: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": None}
# The number of vectors: folds of a layer are norm -> q, k, v; norm -> gate, up; up -> down; and v -> o if each head has
# its own values. Models with fused and transposed layers have only the norms.
FAMILIES: dict[str, tuple[type[PreTrainedModel], Callable[[], Any], list[str], int]] = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**SMALL), ALL_LINEAR, 2 * 9),
    "grouped heads": (LlamaForCausalLM, lambda: LlamaConfig(**SMALL, num_key_value_heads=2), ALL_LINEAR, 2 * 7),
    "qwen2, biases": (Qwen2ForCausalLM, lambda: Qwen2Config(**SMALL, num_key_value_heads=4), ALL_LINEAR, 2 * 9),
    "gemma2, norms of 1 + w": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=16, pad_token_id=0),
        ALL_LINEAR,
        2 * 7,
    ),
    "gpt2, transposed": (GPT2LMHeadModel, lambda: GPT2Config(**GPT2), ["c_attn", "c_proj", "c_fc"], 2 * 2),
}


def write_folded(base: Path, folder: Path, quant: QuantConfig) -> int:
    """Write the float model with folds in its weights, and the file of the folds; return the number of its vectors."""
    engine = unpacked_engine(run_config(base), 3)
    model = engine.executor.model
    schemes = {name: scheme for name, scheme in plan(model, quant).items() if name.startswith(model.layout.layers)}
    probe, *batches = calibration_batches(engine, random_rows(6, 16))
    calibrator = SequentialCalibrator(
        model, batches, probe, engine.executor.cache.one_of_each_shape(), is_sequential(quant)
    )
    shutil.copytree(base, folder)
    for part, layer in zip(parts_of(model, schemes), model.layers, strict=True):
        formats = {name.removeprefix(part.prefix): scheme.weights for name, scheme in part.schemes.items()}
        weights = {name: float_weight(linear_layer(layer, name)).float() for name in formats}
        groups = calibrator.observe(list(formats))
        _, folds = Smoother(layer, model.layout, weights, quant, calibrator.output).smooth(groups, formats)
        calibrator.advance()  # float layers: their outputs are unchanged
        add_folds(folder, fold_tensors({part.prefix + name: fold for name, fold in folds.items()}))
    save_file({name: tensor.contiguous() for name, tensor in weights_of(model).items()}, folder / "model.safetensors")
    return len(load_file(folder / FOLDS))


def engine_with(base: Path, adapter: Path | None, quant: QuantConfig | None = None) -> Engine:
    run = replace(run_config(base), quant=quant or QuantConfig())
    return load_with(run, {} if adapter is None else {"fr": adapter})


def logprobs(engine: Engine, adapter: str | None = "fr") -> Tensor:
    """Return log probabilities of the prompt's own tokens after its first, [T - 1] float32."""
    decode = DecodeConfig(max_new_tokens=1, prompt_logprobs=0, prefix_cache=False)
    (output,) = engine.generate([engine.request(0, PROMPT, decode, adapter=adapter)])
    assert output.error is None
    assert output.prompt_logprobs is not None
    steps = zip(output.prompt_logprobs, PROMPT[1:], strict=True)
    return torch.tensor([step.logprobs[token] for step, token in steps])


def expected_logprobs(base: Path, kind: type[PreTrainedModel], adapter: Path) -> Tensor:
    rows = peft_logprobs(peft_model(base, kind, {"fr": adapter}), "fr", PROMPT)[:-1]
    return rows.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


@pytest.mark.long
@each("method", METHODS)
@each("family", FAMILIES)
def test_folds_alone_as_peft(family: str, method: str, tmp_path: Path) -> None:
    """Without codes only float32 roundings differ, some of them of scaled numbers. Without the vectors the adapter's
    effect differs."""
    kind, config, modules, num_vectors = FAMILIES[family]
    base, folded = tmp_path / "base", tmp_path / "folded"
    write_random(base, kind, config())
    adapter = write_adapter(tmp_path / "fr", base, kind, r=4, target_modules=modules)
    assert write_folded(base, folded, METHODS[method]) == num_vectors
    expected = expected_logprobs(base, kind, adapter)
    assert (logprobs(engine_with(folded, adapter)) - expected).abs().max() < 1e-4
    (folded / FOLDS).unlink()
    assert (logprobs(engine_with(folded, adapter)) - expected).abs().max() > 0.01


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `base`, whose heads all have their own values, an adapter `fr`, texts, and `merged`, the float model with
    the merged adapter."""
    folder = tmp_path_factory.mktemp("smoothed")
    write_llama(folder / "base", num_key_value_heads=4, intermediate_size=96)
    write_adapter(folder / "fr", folder / "base", LlamaForCausalLM, r=4, target_modules=ALL_LINEAR)
    write_rows(folder / "rows.jsonl", random_rows(60, 16))
    convert(folder / "base", folder / "merged", lora=str(folder / "fr"))
    return folder


SMOOTHED = {
    "int4 awq": (replace(CALIBRATED["int4 awq"], overrides={}), QuantizedFormat.compressed_tensors),
    "int4 awq, their files": (replace(CALIBRATED["int4 awq"], overrides={}, skip=["lm_head"]), QuantizedFormat.awq),
    "a8w8 dynamic": (CALIBRATED["a8w8 dynamic smoothquant"], QuantizedFormat.compressed_tensors),
    "a8w8 static": (CALIBRATED["a8w8 static smoothquant"], QuantizedFormat.compressed_tensors),
    "fp8, static cache": (CALIBRATED["fp8 dynamic smoothquant, static cache"], QuantizedFormat.compressed_tensors),
}


@pytest.mark.long
@each("scheme", SMOOTHED)
def test_quantised_as_the_merged_twin(scheme: str, llama: Path, tmp_path: Path) -> None:
    """The adapter on the quantised model is as near to PEFT's float results as the merged model, quantised in the same
    way."""
    quant, format = SMOOTHED[scheme]
    for source in ("base", "merged"):
        run = quantize_run(llama / source, quant, tmp_path / source, llama / "rows.jsonl", format=format)
        make(run, tmp_path / "run")
    expected = expected_logprobs(llama / "base", LlamaForCausalLM, llama / "fr")
    beside = (logprobs(engine_with(tmp_path / "base", llama / "fr")) - expected).norm()
    merged = (logprobs(engine_with(tmp_path / "merged", None), None) - expected).norm()
    # Two draws of the same roundings. Static scales were computed without the adapter, and larger values saturate.
    assert beside < (2 if "static" in scheme else 1.3) * merged
    if quant.method is SMOOTHQUANT:  # AWQ's scaling in this model changes less than four bits lose
        config = tmp_path / "base" / "config.json"
        (tmp_path / "base" / FOLDS).unlink()
        config.write_text(json.dumps(json.loads(config.read_text()) | {"smoothed_by": None}))
        wrong = (logprobs(engine_with(tmp_path / "base", llama / "fr")) - expected).norm()
        assert wrong > 3 * beside


def test_a_calibrating_run_simply_works(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a run keeps has the vectors, also when a later run loads it."""
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    settings = {"quant": "a8w8", "calibrate.data": llama / "rows.jsonl", "model.adapters": f"{{fr:{llama / 'fr'}}}"}
    settings |= {"predict.adapter": "fr", "model.dtype": "float32"}
    overrides = [f"{name}={value}" for name, value in settings.items()]
    expected = expected_logprobs(llama / "base", LlamaForCausalLM, llama / "fr")
    for _ in range(2):
        pipe = pipeline("text_generation", model=llama / "base", device="cpu", overrides=overrides)
        actual = logprobs(pipe.engine)
        assert (actual - expected).norm() < 0.02 * expected.norm()
    (kept,) = (tmp_path / "quantized").iterdir()
    assert (kept / FOLDS).is_file()


@pytest.fixture(scope="module")
def smoothed(llama: Path) -> Path:
    run = quantize_run(llama / "base", CALIBRATED["a8w8 dynamic smoothquant"], llama / "a8w8", llama / "rows.jsonl")
    make(run, llama / "run")
    return llama / "a8w8"


def test_no_index_lists_the_vectors(smoothed: Path) -> None:
    """Therefore other tools, which load the tensors that the index lists, do not read them."""
    index = json.loads((smoothed / "model.safetensors.index.json").read_text())
    assert not any("input_scales" in name or "output_scales" in name for name in index["weight_map"])
    assert FOLDS not in index["weight_map"].values()
    names = {name.rpartition(".")[2] for name in load_file(smoothed / FOLDS)}
    assert names == {"input_scales", "output_scales"}


NAME = "model.layers.0.mlp.up_proj.input_scales"


@each(
    ("tensors", "message"),
    [
        ({NAME: torch.ones(63)}, rf"{NAME} \[63\] matches no layer of this model: the file belongs to another model"),
        ({"model.norm.input_scales": torch.ones(64)}, "model.norm.input_scales .64. matches no layer of this model"),
        ({"model.layers.9.mlp.up_proj.input_scales": torch.ones(0)}, "matches no layer of this model"),
        ({"model.layers.0.mlp.up_proj.bias": torch.ones(0)}, r"up_proj\.bias \[0\] matches no layer of this model"),
        ({NAME: torch.zeros(64)}, rf"{NAME} does not hold positive float32 numbers: quantise the float model again"),
        ({NAME: torch.full((64,), torch.inf)}, "does not hold positive float32 numbers"),
        ({NAME: torch.ones(64).half()}, "does not hold positive float32 numbers"),
    ],
)
def test_vectors_that_are_not_the_models(
    tensors: dict[str, Tensor], message: str, smoothed: Path, llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(smoothed, tmp_path / "model")
    save_file(load_file(smoothed / FOLDS) | tensors, tmp_path / "model" / FOLDS)
    with pytest.raises(UserError, match=message):
        engine_with(tmp_path / "model", llama / "fr")


def test_a_damaged_file_of_vectors(smoothed: Path, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(smoothed, tmp_path / "model")
    (tmp_path / "model" / FOLDS).write_bytes(b"not tensors")
    with pytest.raises(UserError, match=rf"{FOLDS} is truncated or not a safetensors file"):
        engine_with(tmp_path / "model", llama / "fr")


REMEDY = r", and the model's files do not contain the scales: quantise the float model here without quant\.shift, use the float model"


def test_models_without_their_vectors_are_refused(smoothed: Path, llama: Path, tmp_path: Path) -> None:
    """Ours of earlier versions, and those of other tools, identified by their files."""
    shutil.copytree(smoothed, tmp_path / "model", ignore=shutil.ignore_patterns(FOLDS))
    with pytest.raises(
        UserError, match=f"adapter fr was trained on activations that smoothquant has scaled in this model{REMEDY}"
    ):
        engine_with(tmp_path / "model", llama / "fr")
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    del values["smoothed_by"]
    config.write_text(json.dumps(values))
    (tmp_path / "model" / "recipe.yaml").write_text("stage:\n  modifiers:\n    AWQModifier: {}\n")
    with pytest.raises(UserError, match=f"that awq has scaled in this model{REMEDY}"):
        engine_with(tmp_path / "model", llama / "fr")
    engine_with(tmp_path / "model", None)


def test_shifted_models_are_refused(tmp_path: Path) -> None:
    """A shift adds a bias to a layer's outputs through an adapter, which unmerged adapters do not support."""
    kind, config, modules, _ = FAMILIES["gpt2, transposed"]
    write_random(tmp_path / "base", kind, config())
    adapter = write_adapter(tmp_path / "fr", tmp_path / "base", kind, r=4, target_modules=modules)
    data = write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    make(
        quantize_run(tmp_path / "base", replace(METHODS["smoothquant"], shift=True), tmp_path / "model", data),
        tmp_path / "run",
    )
    assert not (tmp_path / "model" / FOLDS).exists()
    with pytest.raises(UserError, match=rf"that smoothquant with quant\.shift has scaled in this model{REMEDY}"):
        engine_with(tmp_path / "model", adapter)

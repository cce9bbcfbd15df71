"""quant.activations=auto: unquantised for few rows, int8 for many, as each run chooses.

R rows, I input channels, O output channels.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, QuantConfig
from kernels.linear import matmul, pack_codes
from kernels.quantize_rows import QuantizedActivations, quantize_rows
from models.layers.linear import Linear
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from quantization.layouts.floats import FloatLayout
from quantization.linear import MANY_ROWS, IntMethod
from quantization.scheme import LinearScheme
from quantization.weight_format import WeightFormat, quantize
from tests.helpers.builders import all_logits, complete, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.quantized_models import CALIBRATED, GROUPS, INT4, INT8, make, quantize_run, random_rows, write_rows
from tests.helpers.random_tensors import random

LLAMA = GOLDENS / "llama3"
AUTO = Activations.auto
FEW, MANY = list(range(5, 4 + MANY_ROWS)), list(range(5, 40))  # prompts
FORMATS = {
    "int8": WeightFormat(8),
    "int8, groups": WeightFormat(8, group_size=32),
    "int4": WeightFormat(4, group_size=32),
    "int4, zero points": WeightFormat(4, symmetric=False, group_size=32),
}


def layer_of(format: WeightFormat, weight: Tensor, activations: Activations) -> Linear:
    outputs, inputs = weight.shape
    layout = FloatLayout((outputs, inputs), False, format)
    layer = Linear(inputs, outputs, bias=False)
    layer.method = IntMethod(LinearScheme(format, activations), layout, layer.shape)
    layer.load({"weight": weight}, torch.float32, torch.device("cpu"))
    return layer


def engine_of(folder: Path, quant: QuantConfig) -> Engine:
    return load_engine(replace(run_config(folder), quant=quant), 3)


@each("name", FORMATS)
def test_few_rows_stay_floats_and_many_are_quantised(name: str) -> None:
    weight, x = random(33, 96), random(3 * MANY_ROWS, 96, seed=1)
    auto, none = (layer_of(FORMATS[name], weight, kind) for kind in (AUTO, Activations.none))
    stored = quantize(weight, FORMATS[name])
    packed = pack_codes(stored.codes, stored.scales, stored.zero_points, FORMATS[name].bits)
    for num_rows in (0, 1, MANY_ROWS - 1):
        assert auto(x[:num_rows], None).equal(none(x[:num_rows], None))
        assert auto(x[:num_rows], None).equal(matmul(x[:num_rows], packed))
    for num_rows in (MANY_ROWS, MANY_ROWS + 1, 3 * MANY_ROWS):
        codes, scales = quantize_rows(x[:num_rows])
        assert auto(x[:num_rows], None).equal(matmul(QuantizedActivations(codes, scales, torch.float32), packed))
        assert not auto(x[:num_rows], None).equal(none(x[:num_rows], None))


@each("name", FORMATS)
def test_the_error_is_half_a_step_of_each_input(name: str) -> None:
    """|y - x W^T| is at most max |x| / 127 / 2 for each input, times its weight, in float64."""
    weight, x = random(33, 96), random(3 * MANY_ROWS, 96, seed=1)
    values = quantize(weight, FORMATS[name]).dequantize().double()  # [O, I]
    exact = x.double() @ values.T
    steps = x.double().abs().amax(1, keepdim=True) / 127  # [R, 1]
    float32 = 2**-20 * (x.double().abs() @ values.abs().T)  # sums of 3 groups, and the scale's own rounding
    error = (layer_of(FORMATS[name], weight, AUTO)(x, None) - exact).abs()
    assert (error <= steps / 2 * values.abs().sum(1) + float32).all()
    assert (error > float32).any()


@each("quant", [QuantConfig(INT8), QuantConfig(INT4, **GROUPS), QuantConfig(INT4, symmetric=False)])
def test_a_model_s_short_prompts_are_exact_and_long_ones_nearly(quant: QuantConfig) -> None:
    none, auto = (engine_of(LLAMA, replace(quant, activations=kind)) for kind in (Activations.none, AUTO))
    assert all_logits(auto, FEW).equal(all_logits(none, FEW))
    expected, seen = all_logits(none, MANY), all_logits(auto, MANY)
    error = (seen - expected).square().mean().sqrt() / expected.std()
    assert 0 < error < 0.12  # the bound of a8w8's error in test_quantized_models.py, which includes the weights' error


def test_captured_steps_of_many_rows_equal_computed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is captured by its shape, so the choice for its rows is the same in all of its replays."""
    run = replace(run_config(LLAMA), quant=QuantConfig(INT8, activations=AUTO))
    decode = DecodeConfig(max_new_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    prompts = random_rows(MANY_ROWS + 1, 12)
    captured = complete(load_engine(run, len(prompts)), prompts, decode)
    monkeypatch.setattr("pipelines.engine.executor.MAX_RECORDED_TOKENS", 0)
    assert complete(load_engine(run, len(prompts)), prompts, decode) == captured


def test_a_quantised_model_takes_it_in_any_run(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    quant, folder = CALIBRATED["int4 gptq"], tmp_path / "made"
    make(quantize_run(LLAMA, quant, folder, data), tmp_path / "run")
    none, bare, named = (
        engine_of(folder, config)
        for config in (QuantConfig(), QuantConfig(activations=AUTO), replace(quant, activations=AUTO))
    )
    assert all_logits(bare, FEW).equal(all_logits(none, FEW))
    assert not all_logits(bare, MANY).equal(all_logits(none, MANY))
    assert all_logits(bare, MANY).equal(all_logits(named, MANY))
    with pytest.raises(UserError, match="quant=int4 contradicts the checkpoint"):
        engine_of(folder, QuantConfig(INT4, activations=AUTO))


def test_a_calibrated_model_is_made_once_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    run = quantize_run(LLAMA, CALIBRATED["int8 gptq"], None, data)
    none = load_engine(run, 3)
    monkeypatch.setattr("pipelines.loading.quantize.share.Quantizer", None)  # must not calibrate again
    auto = load_engine(replace(run, quant=replace(run.quant, activations=AUTO)), 3)
    assert all_logits(auto, FEW).equal(all_logits(none, FEW))
    assert not all_logits(auto, MANY).equal(all_logits(none, MANY))


def test_a_packed_model_is_kept_once_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    run = replace(run_config(LLAMA, keep_packed=True), quant=QuantConfig(INT8))
    none = load_engine(run, 3)
    auto = load_engine(replace(run, quant=replace(run.quant, activations=AUTO)), 3)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) == 1
    assert all_logits(auto, FEW).equal(all_logits(none, FEW))
    assert all_logits(auto, MANY).equal(all_logits(engine_of(LLAMA, QuantConfig(INT8, activations=AUTO)), MANY))


def test_where_nothing_would_use_it_it_is_refused(tmp_path: Path) -> None:
    message = (
        "quant.activations=auto is for int8 and int4 weights with float activations, and this model has none: leave"
    )
    with pytest.raises(UserError, match=message):
        engine_of(LLAMA, QuantConfig(activations=AUTO))
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    make(quantize_run(LLAMA, CALIBRATED["a8w8 static"], tmp_path / "a8w8", data), tmp_path / "run")
    with pytest.raises(UserError, match=message):
        engine_of(tmp_path / "a8w8", QuantConfig(activations=AUTO, kv_cache=KVCacheFormat.int8))

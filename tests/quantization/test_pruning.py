"""quant.sparsity: the entries that become 0 follow the papers' formulas, and stay 0 with every scheme."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from conf.compose import compose_run_config, dump
from conf.decoding import warn_once
from conf.errors import UserError
from conf.quantization import (
    CalibrateConfig,
    GptqConfig,
    QuantConfig,
    SparsityConfig,
    SparsityMethod,
    SparsityPattern,
)
from conf.schema import RunConfig
from models.config import ConfigReader
from models.linear_layers import linear_specs
from pipelines.loading.load_engine import load_engine
from pipelines.loading.quantize.calibration_data import read_calibration_data
from quantization.layouts import read_quantization
from quantization.pruning import pruned_entries
from tests.helpers.builders import all_logits, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.conversion import tensors_in
from tests.helpers.quantized_models import (
    A8W8,
    AWQ,
    DYNAMIC,
    FP8,
    GPTQ,
    INT4,
    INT8,
    SMOOTHQUANT,
    make,
    quantize_run,
    random_rows,
    reloaded,
    write_rows,
)
from tests.helpers.random_tensors import random

MAGNITUDE, WANDA = SparsityMethod.magnitude, SparsityMethod.wanda
TWO_OF_FOUR = SparsityPattern["2:4"]
# the effect of each quantisation method on zeros, in a Llama whose inputs are not all multiples of its groups
PRUNED = {
    "int8": QuantConfig(INT8, sparsity=SparsityConfig(MAGNITUDE, pattern=TWO_OF_FOUR)),
    "int4 gptq": QuantConfig(INT4, GPTQ, group_size=32, sparsity=SparsityConfig(WANDA, pattern=TWO_OF_FOUR)),
    "int4 gptq, groups on the way": QuantConfig(
        INT4, GPTQ, group_size=32, symmetric=False, gptq=GptqConfig(static_groups=False), sparsity=SparsityConfig(WANDA, 0.7)
    ),
    "int4 awq": QuantConfig(INT4, AWQ, group_size=32, symmetric=False, auto_clip=True, sparsity=SparsityConfig(WANDA)),
    "a8w8": QuantConfig(A8W8, SMOOTHQUANT, activations=DYNAMIC, sparsity=SparsityConfig(WANDA, 0.3)),
    "fp8 gptq": QuantConfig(FP8, GPTQ, activations=DYNAMIC, sparsity=SparsityConfig(MAGNITUDE)),
}  # fmt: skip
ROWS, PROMPT = random_rows(20, 16), [1, *range(5, 50)]


def least(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the `count` smallest entries of each row, the first of equal ones."""
    order = scores.argsort(1, kind="stable")[:, :count]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, True, 1)
    return mask


def test_the_least_are_pruned_and_no_more() -> None:
    ratios, shapes = ("0.5", "0.29", "0.07", "0.99"), ((1, 1), (3, 7), (5, 100), (4, 64))
    for (outputs, inputs), ratio, many_equal in product(shapes, ratios, (False, True)):
        weight, norms = random(outputs, inputs).bfloat16(), random(inputs, seed=1).abs()
        weight = weight.sign() if many_equal else weight
        magnitudes, scores = weight.float().abs().numpy(), (weight.float().abs() * norms).numpy()
        wanda, magnitude = SparsityConfig(WANDA, float(ratio)), SparsityConfig(MAGNITUDE, float(ratio))
        of_row, of_all = (int(Fraction(ratio) * count) for count in (inputs, outputs * inputs))
        assert (pruned_entries(weight, norms, wanda).numpy() == least(scores, of_row)).all()
        assert (pruned_entries(weight, None, wanda).numpy() == least(magnitudes, of_row)).all()
        expected = least(magnitudes.reshape(1, -1), of_all).reshape(outputs, inputs)
        assert (pruned_entries(weight, norms, magnitude).numpy() == expected).all()
        if ratio == "0.5" and inputs % 4 == 0:
            for method, errors in (WANDA, scores), (MAGNITUDE, magnitudes):
                entries = pruned_entries(weight, norms, SparsityConfig(method, pattern=TWO_OF_FOUR)).numpy()
                assert (entries.reshape(-1, 4) == least(errors.reshape(-1, 4), 2)).all()
    with pytest.raises(UserError, match="activations are NaN or infinite"):
        pruned_entries(random(2, 4), torch.tensor([1, 2, 3, torch.nan]), SparsityConfig(WANDA))


def pruned_as_by_the_authors(
    model: LlamaForCausalLM, made: dict[str, Tensor], rows: list[list[int]], ratio: float, skipped: str
) -> None:
    """Check Wanda as in its authors' code: one decoder layer at a time, whose inputs are the outputs of the pruned
    layers before it.

    Scores are float64 here and float32 in the product: the smallest kept score may be below another by a rounding.
    """
    for number, layer in enumerate(model.model.layers):
        squares: dict[str, Tensor] = {}
        linears = {name: module for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}

        def watch(name: str, squares: dict[str, Tensor] = squares) -> Any:
            def add(module: Any, inputs: Any, output: Any) -> None:
                squares[name] = squares.get(name, 0) + inputs[0].double().flatten(0, -2).square().sum(0)

            return add

        hooks = [module.register_forward_hook(watch(name)) for name, module in linears.items()]
        for row in rows:
            model(torch.tensor([row]))
        for hook in hooks:
            hook.remove()
        for name, module in linears.items():
            full_name = f"model.layers.{number}.{name}"
            weight, scores = made[f"{full_name}.weight"], module.weight.double().abs() * squares[name].sqrt()
            zeros = weight == 0
            assert weight.equal(module.weight.masked_fill(zeros, 0))
            assert (zeros.sum(1) == (0 if full_name == skipped else int(scores.shape[1] * ratio))).all()
            if full_name != skipped:
                largest_pruned = scores.where(zeros, 0).amax(1)
                assert (largest_pruned <= scores.where(~zeros, torch.inf).amin(1) * (1 + 1e-5)).all()
            module.weight.copy_(weight)


@torch.no_grad()
def test_a_model_is_pruned_as_by_the_authors_and_loads_in_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, skipped = write_llama(tmp_path / "float", intermediate_size=92), "model.layers.1.self_attn.k_proj"
    quant = QuantConfig(sparsity=SparsityConfig(WANDA, 0.6), skip=[skipped])
    run = quantize_run(tmp_path / "float", quant, tmp_path / "made", write_rows(tmp_path / "rows.jsonl", ROWS))
    made = make(run, tmp_path / "run")
    warn_once.cache_clear()
    tensors, samples = tensors_in(tmp_path / "made"), read_calibration_data(run.calibrate, None, 16, False).samples
    pruned_as_by_the_authors(theirs, tensors, samples, 0.6, skipped)
    for name, expected in theirs.state_dict().items():
        assert tensors[name].equal(expected), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert loaded(torch.tensor([PROMPT])).logits.equal(theirs(torch.tensor([PROMPT])).logits)
    again = reloaded(tmp_path / "made")
    assert all_logits(again, PROMPT).equal(all_logits(made, PROMPT))
    assert "weights are pruned (unstructured): they run dense on cpu" in caplog.text
    check_report(tmp_path, tensors)
    # a pruned model is a float model
    int8 = load_engine(replace(run_config(tmp_path / "made"), quant=QuantConfig(INT8)), 1)
    assert int8.executor.weight_bytes < again.executor.weight_bytes


def check_report(folder: Path, tensors: dict[str, Tensor]) -> None:
    zeros = sum(int((t == 0).sum()) for t in tensors.values())
    share = zeros / sum(t.numel() for t in tensors.values())
    config = json.loads((folder / "made" / "config.json").read_text())["quantization_config"]
    assert config["sparsity_config"] == {
        "format": "dense",
        "sparsity_structure": "unstructured",
        "global_sparsity": pytest.approx(100 * share),
        "targets": ["Linear"],
        "ignore": ["model.layers.1.self_attn.k_proj", "lm_head"],
        "registry_requires_subclass": False,
    }
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["sparsity"] == pytest.approx(share)
    assert metrics["weight_bytes"] == metrics["weight_bytes_before"]
    assert metrics["perplexity"] != metrics["perplexity_before"]
    report = (folder / "made" / "report.md").read_text()
    assert f"| zeros of pruned layers, of all weights | | {share:.2%} |" in report
    down = tensors["model.layers.0.mlp.down_proj.weight"]  # 55 of 92
    assert f"| model.layers.0.mlp.down_proj | float | {float((down == 0).float().mean()):.3%} |" in report
    assert "k_proj" not in report.split("model.layers.1", 1)[1]


@pytest.mark.long
@each("name", PRUNED)
def test_zeros_stay_zeros_under_every_scheme(name: str, tmp_path: Path) -> None:
    quant, data = PRUNED[name], write_rows(tmp_path / "rows.jsonl", ROWS)
    write_llama(tmp_path / "float", intermediate_size=96)
    made = make(quantize_run(tmp_path / "float", quant, tmp_path / "made", data), tmp_path / "run")
    again = reloaded(tmp_path / "made")
    assert all_logits(again, PROMPT).equal(all_logits(made, PROMPT))
    tensors = tensors_in(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    stored = read_quantization(ConfigReader({"quantization_config": config}, "config.json"), [])
    assert stored is not None
    for layer, spec in linear_specs(again.executor.model).items():
        layer_tensors = {key.removeprefix(f"{layer}."): t for key, t in tensors.items() if key.startswith(f"{layer}.")}
        weight = (
            stored.layout(spec, {key: tuple(t.shape) for key, t in layer_tensors.items()})
            .read(layer_tensors)
            .weight.dequantize()
        )
        zeros = (weight == 0).double()
        if layer == "lm_head":
            assert zeros.mean() < 0.3  # 4-bit codes round some weights to 0
        elif quant.sparsity.pattern is TWO_OF_FOUR:
            assert zeros.unflatten(1, (-1, 4)).sum(2).min() >= 2
        elif quant.sparsity.method is WANDA:
            assert zeros.sum(1).min() >= int(Fraction(str(quant.sparsity.ratio)) * weight.shape[1])
        else:
            assert zeros.mean() >= quant.sparsity.ratio


def test_options_as_they_are_typed() -> None:
    quantize, wanda = "task=quantize", "quant.sparsity.method=wanda"
    composed = compose_run_config([quantize, wanda, "quant.sparsity.pattern=2:4", "quant=int8"])
    assert composed.quant.sparsity == SparsityConfig(WANDA, 0.5, TWO_OF_FOUR)
    assert "pattern: '2:4'" in dump(composed, Path("out"))  # without quotes YAML reads 124
    with pytest.raises(UserError, match="'4:8', expected one of .unstructured, 2:4"):
        compose_run_config([quantize, wanda, "quant.sparsity.pattern=4:8"])
    with pytest.raises(
        UserError, match="method=wanda is not used by task=predict: make the pruned model by task=quant"
    ):
        RunConfig(quant=QuantConfig(sparsity=SparsityConfig(WANDA)))
    for ratio in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(
            UserError, match=f"quant.sparsity.ratio={ratio} is not allowed: give a number between 0 and 1"
        ):
            SparsityConfig(WANDA, ratio)
    with pytest.raises(UserError, match="ratio=0.4 is not allowed with quant.sparsity.pattern=2:4"):
        SparsityConfig(MAGNITUDE, 0.4, TWO_OF_FOUR)
    with pytest.raises(UserError, match="quant.sparsity.ratio=0.3 is not used by quant.sparsity.method=none"):
        SparsityConfig(ratio=0.3)
    smoothed = QuantConfig(A8W8, SMOOTHQUANT, activations=DYNAMIC)
    pruned = replace(smoothed, sparsity=SparsityConfig(WANDA))  # it needs more samples than smoothing
    assert [CalibrateConfig().resolved(quant).num_samples for quant in (smoothed, pruned)] == [4, 128]

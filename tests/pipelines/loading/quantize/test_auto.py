"""quant=auto: the allocation against all choices, and plans on Llama: budgets, reuse, and bad input."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from conf.errors import UserError
from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig, QuantMethod, QuantScheme
from conf.schema import RunConfig, Task
from models.linear_layers import linear_layer, linear_specs
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from quantization.allocation import Candidate, allocate
from quantization.linear import CodedMethod
from tests.helpers.builders import all_logits
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDENS
from tests.helpers.quantized_models import quantize_run, random_rows, write_rows

LLAMA = GOLDENS / "llama3"
PROMPT = list(range(5, 40))


@each("seed", range(20))
def test_no_choice_of_fewer_bytes_has_a_smaller_loss(seed: int) -> None:
    """Up to one step, because a choice cannot end between two candidates."""
    random = Random(seed)
    groups = [
        [Candidate(str(i), random.randrange(1, 50), random.random()) for i in range(random.randrange(1, 5))]
        for _ in range(5)
    ]
    least = sum(min(candidate.num_bytes for candidate in group) for group in groups)
    largest_step = max(candidate.num_bytes for group in groups for candidate in group)
    for max_bytes in (least, least + 20, least + 60, 1000):
        chosen = allocate(groups, max_bytes)
        assert sum(candidate.num_bytes for candidate in chosen) <= max_bytes
        loss = sum(candidate.loss for candidate in chosen)
        for choice in product(*groups):
            if sum(candidate.num_bytes for candidate in choice) <= max(least, max_bytes - largest_step):
                assert loss <= sum(candidate.loss for candidate in choice) + 1e-12
    with pytest.raises(ValueError, match="less than the smallest"):
        allocate(groups, least - 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    data = write_rows(tmp_path / "rows.jsonl", random_rows(30, 16))
    made = quantize_run(LLAMA, QuantConfig(QuantScheme.auto, bits=5.0), None, data)
    return replace(made, task=Task.predict, quantize=QuantizeConfig())


def load(run: RunConfig, **quant: Any) -> Engine:
    if "plan" in quant:
        run = replace(run, calibrate=CalibrateConfig())  # a plan measures nothing
    return load_engine(replace(run, quant=QuantConfig(QuantScheme.auto, **quant)), 3)


def test_a_plan_within_its_budget(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(run, bits=5.6)
    model = engine.executor.model
    (file,) = (tmp_path / "plans").glob("*.yaml")
    formats = yaml.safe_load(file.read_text())["overrides"]
    assert formats.keys() == linear_specs(model).keys()
    assert len({*formats.values()}) > 1
    methods = {name: linear_layer(model, name).method for name in formats}
    assert all(isinstance(method, CodedMethod) for method in methods.values())
    specs = linear_specs(model).values()
    num_weights = sum(spec.shape[0] * spec.shape[1] for spec in specs)
    assert sum(8 * method.num_bytes(engine.dtype) for method in methods.values()) <= 5.6 * num_weights
    for name, format in formats.items():  # kernels multiply them together
        for first, *others in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if name.endswith(first):
                assert {formats[name.replace(first, other)] for other in others} == {format}

    expected = all_logits(engine, PROMPT)
    weighted = all_logits(load(run, bits=5.6, method=QuantMethod.imatrix), PROMPT)
    assert not weighted.equal(expected)
    (imatrix,), (other,) = (tmp_path / "imatrix").glob("*.gguf"), {*(tmp_path / "plans").glob("*.yaml")} - {file}

    monkeypatch.setattr("pipelines.loading.quantize.sensitivity.Predictions", None)  # must not measure again
    again = load(run, plan=str(other), method=QuantMethod.imatrix, imatrix=str(imatrix))
    assert all_logits(again, PROMPT).equal(weighted)
    assert all_logits(load(run, bits=5.6), PROMPT).equal(expected)
    assert load(run, bits=6.5).executor.weight_bytes > engine.executor.weight_bytes
    assert all_logits(load(run, plan=str(file)), PROMPT).equal(expected)
    changed = load(run, plan=str(file), overrides={"lm_head": "none"}).executor.model
    assert not isinstance(linear_layer(changed, "lm_head").method, CodedMethod)


def test_bytes_of_all_weights_and_bad_input(run: RunConfig, tmp_path: Path) -> None:
    floats = load_engine(replace(run, quant=QuantConfig(), calibrate=CalibrateConfig()), 3).executor.weight_bytes
    for share, more in (
        (0.37, {}),
        (0.40, {}),
        (0.38, {"overrides": {"lm_head": "int8"}}),
        (0.53, {"skip": ["lm_head"]}),
    ):
        max_bytes = int(floats * share)
        size = load(run, max_bytes=max_bytes, **more).executor.weight_bytes
        assert 0.95 * max_bytes < size <= 1.01 * max_bytes  # packed weights are padded to tiles of 16 outputs

    plan = tmp_path / "plan.yaml"
    plan.write_text("overrides: {model.layers.9.mlp.up_proj: int8, other: q5_0, lm_head: int8}")
    no_plan = tmp_path / "no_plan.yaml"
    no_plan.write_text("- 1")
    for quant, message in (
        ({"bits": 1.5}, r"quant.bits=1.5 is less than the smallest formats of this model: give at least [4-8]"),
        ({"max_bytes": 1000}, r"quant.max_bytes=1000 is less than .*: give at least \d{5}"),
        (
            {"plan": str(plan)},
            r"2 layers that this model lacks \(model.layers.9.mlp.up_proj, other\): give the plan of",
        ),
        ({"plan": str(no_plan)}, r"no_plan.yaml is not a plan: give the file that a run"),
        ({"plan": str(tmp_path / "absent")}, "cannot be read: .*No such file"),
        ({"bits": 5.0, "skip": ["*"]}, "has no layer to choose for: give fewer"),
        ({"bits": 5.0, "max_bytes": 10**9}, "has quant.bits=5.0 and quant.max_bytes=1000000000: give"),
    ):
        with pytest.raises(UserError, match=message):
            load(run, **quant)
    assert len([*(tmp_path / "plans").glob("*.yaml")]) == 4  # of the budgets that were met

"""A config that describes far more than the files contain is refused before a model of its size is built."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralForCausalLM

from conf.errors import UserError
from conf.schema import ModelConfig, Weights
from conf.tasks import CheckpointFormat
from models.decoder import DecoderLayer
from models.layers.linear import Linear
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.quantize.calibrated import calibration_job
from pipelines.loading.quantize.preflight import print_preflight
from tests.helpers.builders import engine_of, run_config
from tests.helpers.cases import each
from tests.helpers.conversion import convert
from tests.helpers.oracle import write_model

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
REFUSED = "does not hold the model that its config describes: a model of .* layers with more values than .* bytes of weights can hold"


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def num_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of decoder layers and linear layers whose construction began."""
    counts = [0]

    def counted(kind: type) -> None:
        begin = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            counts[0] += 1
            begin(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", init)

    counted(DecoderLayer)
    counted(Linear)
    return counts


@each(
    "model_class, changes",
    [
        (LlamaForCausalLM, {"num_hidden_layers": 1_000_000}),
        (LlamaForCausalLM, {"hidden_size": 2**30}),
        (LlamaForCausalLM, {"intermediate_size": 2**30, "num_hidden_layers": 1_000_000}),
        (LlamaForCausalLM, {"vocab_size": 2**30, "num_hidden_layers": 1_000_000}),
        (MixtralForCausalLM, {"num_local_experts": 1_000_000}),
        (MixtralForCausalLM, {"num_hidden_layers": 1000, "num_local_experts": 1000}),
    ],
)
def test_sizes_are_bounded_by_the_weights(
    model_class: Any, changes: dict[str, Any], tmp_path: Path, num_made: list[int]
) -> None:
    num_made[0] = 0
    write_model(tmp_path, model_class, **SIZES)
    change(tmp_path, **changes)
    with pytest.raises(UserError, match=REFUSED):
        engine_of(tmp_path)
    assert num_made[0] < 3000  # of the million in the config


def test_every_layout_and_task_is_bounded(tmp_path: Path, num_made: list[int]) -> None:
    model = write_model(tmp_path / "hf", LlamaForCausalLM, **SIZES)
    sharded = convert(tmp_path / "hf", tmp_path / "sharded", format=CheckpointFormat.sharded, tp=2, pp=2)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    for folder in (tmp_path / "hf", sharded, pickled):
        change(folder, num_hidden_layers=1_000_000)
        with pytest.raises(UserError, match=REFUSED):
            engine_of(folder, allow_pickle=True)
    for format in (CheckpointFormat.hf, CheckpointFormat.gguf):
        with pytest.raises(UserError, match=REFUSED):
            convert(tmp_path / "hf", tmp_path / "made", format=format)
    run = run_config(tmp_path / "hf")
    with pytest.raises(UserError, match=REFUSED):
        print_preflight(calibration_job(run), resolve_model(run.model), tmp_path)
    assert num_made[0] < 10_000


def test_damaged_files_are_reported_before_other_errors(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM, **SIZES)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match=r"model.safetensors is truncated or not a safetensors file"):
        engine_of(tmp_path)


def test_a_config_with_a_value_for_each_layer_takes_no_memory(tmp_path: Path) -> None:
    write_model(tmp_path, MixtralForCausalLM, **SIZES)
    change(tmp_path, num_hidden_layers=2**31 - 1)
    with pytest.raises(UserError, match=r"num_hidden_layers=2147483647 is not a number above 0 and below 2\*\*20"):
        engine_of(tmp_path)


@pytest.mark.long
def test_random_weights_are_bounded_by_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, LlamaForCausalLM, **SIZES)
    change(tmp_path, num_hidden_layers=200)
    run = run_config(tmp_path, weights=Weights.random)
    assert load_engine(run, 1).executor.model.config.num_hidden_layers == 200
    with pytest.raises(UserError, match=REFUSED):
        load_engine(replace(run, model=ModelConfig(path=str(tmp_path), tokenizer=None)), 1)

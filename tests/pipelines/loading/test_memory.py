"""The GPU memory that a run needs, estimated on a model without weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import conf.decoding
from conf.errors import UserError
from conf.quantization import QuantConfig, QuantScheme
from conf.schema import DeviceConfig, DeviceType, RunConfig, Task
from models.causal_lm import CausalLM
from models.config import ConfigReader
from models.registry import find_architecture
from pipelines.engine.graph_steps import GraphSteps
from pipelines.engine.steps import StepOutputs
from pipelines.loading import cache_allocation, weight_loading
from pipelines.loading import load_engine as loading
from pipelines.loading.device import prepare_device
from pipelines.loading.load_engine import load_engine
from pipelines.loading.memory import check_memory, max_layer_values, step_bytes, weight_bytes
from pipelines.tasks import launch
from quantization.plan import quantize_while_loading
from tests.bench.gpu_rows import CONFIGS
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each

GB = 10**9


def on_meta(size: str) -> CausalLM:
    reader = ConfigReader(dict(CONFIGS[size]), "test")
    architecture = find_architecture(reader)
    with torch.device("meta"):
        return architecture.build(architecture.read_config(reader))


@each(("size", "num_parameters"), [("8B", 8_030_261_248), ("1.5B", 1_543_714_304)])
def test_weights_of_published_models(size: str, num_parameters: int) -> None:
    """The parameter counts of Llama 3.1 8B and Qwen2.5 1.5B, by their model cards' files."""
    assert weight_bytes(on_meta(size), torch.bfloat16) == 2 * num_parameters
    assert weight_bytes(on_meta(size), torch.float32) == 4 * num_parameters


def test_quantised_weights() -> None:
    """int4 with groups of 128 is 4 + 32 / 128 bits per weight; the embedding is unquantised."""
    model = on_meta("8B")
    quantize_while_loading(model, QuantConfig(QuantScheme.int4, group_size=128))
    embedding, norms = 128256 * 4096, 65 * 4096
    coded = 8_030_261_248 - embedding - norms
    assert weight_bytes(model, torch.bfloat16) == 2 * (embedding + norms) + coded * (4 + 32 / 128) / 8


def test_a_step() -> None:
    """Around `down_proj`: 14336 inputs, 4096 outputs, and the gate; logits of two sequences."""
    widest = max_layer_values(on_meta("8B"))
    assert widest == 14336 + 4096 + 14336
    assert step_bytes(widest, 128256, torch.bfloat16, 10, 2) == 10 * widest * 2 + 2 * 128256 * (2 + 4)


def test_too_little_memory_is_one_line() -> None:
    check_memory(15 * GB, 1 * GB, 16 * GB, 0.9)
    message = (
        r"the GPU has 16.00 GB free within device.memory_fraction=0.9, but the weights need 15.00 GB and a step 1.50 GB: "
        "give quant=int8 or int4, less device.max_batched_tokens, a larger fraction, or end what else uses the GPU"
    )
    with pytest.raises(UserError, match=message):
        check_memory(15 * GB, 3 * GB // 2, 16 * GB, 0.9)


def test_nothing_is_loaded_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    monkeypatch.setattr(loading, "prepare_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(cache_allocation, "free_memory", lambda device, fraction: 100_000)
    monkeypatch.setattr(weight_loading, "load_weights", lambda *args: pytest.fail("weights were read"))
    run = replace(run_config(tmp_path), device=DeviceConfig(DeviceType.cuda))
    with pytest.raises(
        UserError, match=r"the GPU has 0.00 GB free .*, but the weights need 0.00 GB and a step 0.00 GB"
    ):
        load_engine(run, 3)


@pytest.mark.long
def test_memory_that_ends_in_a_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB. If reserved memory is large, read"

    def fills(*args: object) -> None:
        raise torch.OutOfMemoryError(said)

    monkeypatch.setattr("pipelines.tasks.predict.run_predict", fills)
    with pytest.raises(
        UserError, match=r"the GPU's memory is full \(Tried .* 2.00 GiB. GPU .* 8 GiB.\): give less"
    ) as error:
        launch.launch(RunConfig(task=Task.predict), tmp_path, lambda run, folder: "")
    assert "\n" not in str(error.value)


def test_memory_that_ends_while_steps_are_captured_is_not_a_reason_to_do_without() -> None:
    def fills(*step: object) -> StepOutputs:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        GraphSteps(fills, None, 2, 1, 0, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_gpu_is_told_that_none_has_run_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    conf.decoding.warn_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    for _ in range(2):
        assert prepare_device(DeviceConfig(DeviceType.cuda)).type == "cuda"
    assert [record.getMessage() for record in caplog.records] == [
        "device=cuda: the Triton kernels are proved in the interpreter alone, no GPU has run them yet"
    ]

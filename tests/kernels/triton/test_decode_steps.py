"""Padded decode steps of a whole model with the GPU's kernels: padding rows must not be stored and must not change
other rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import kernels.kv_store.triton
import kernels.linear
import kernels.lora.triton
import kernels.moe.triton
import kernels.paged_attention.triton
import kernels.rms_norm.triton
import kernels.swiglu.triton
import models.decoder
import models.layers.attention
import models.layers.linear
import models.layers.moe
import models.layers.norm
from conf.decoding import DecodeConfig
from conf.quantization import Activations, QuantConfig, QuantScheme
from models.adapters import has_adapters
from models.layers.moe import Experts
from pipelines.engine import Engine
from pipelines.engine.graph_steps import GraphSteps
from pipelines.loading.load_engine import load_engine
from tests.helpers.adapters import load_with, outputs, write_adapter
from tests.helpers.builders import complete, engine_of, run_config, write_llama
from tests.helpers.catalog import GOLDENS
from tests.helpers.observed_steps import compute_again
from tests.helpers.triton_cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_engine.py has true graphs")
PROMPTS, DECODE = [[3, 4, 5], [6], [7, 8]], DecodeConfig(max_new_tokens=3, prefix_cache=False)


def tokens(engine: Engine) -> list[list[int]]:
    return [completion.token_ids for completion in complete(engine, PROMPTS, DECODE)]


def padded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return the engine with decode steps of three sizes with the GPU's kernels."""
    for module, kernel in (
        (models.layers.attention, kernels.paged_attention.triton.paged_attention),
        (models.layers.norm, kernels.rms_norm.triton.rms_norm),
        (models.layers.norm, kernels.rms_norm.triton.add_rms_norm),
        (models.layers.linear, kernels.swiglu.triton.swiglu),
        (models.decoder, kernels.kv_store.triton.rope_and_store),
        (models.layers.moe, kernels.moe.triton.route),
        (models.layers.linear, kernels.lora.triton.lora_add),
    ):
        monkeypatch.setattr(module, kernel.__name__, kernel)
    executor, sizes = engine.executor, (4, 3, 0, torch.device("cpu"))
    executor.decode_steps = GraphSteps(executor.compute, compute_again, *sizes)
    assert executor.decode_steps.sizes == [1, 2, 4]
    if has_adapters(executor.model):
        executor.adapted_steps = GraphSteps(executor.compute, compute_again, *sizes, with_adapters=True)
        assert executor.adapted_steps.sizes == [1, 2, 4]
    return engine


def test_an_engine_gives_the_cpus_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    expected = tokens(engine_of(tmp_path, block_size=4))
    assert tokens(padded(engine_of(tmp_path, block_size=4), monkeypatch)) == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # padding rows are NaN
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_so_does_one_whose_layers_are_joined(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values, and gate and up, are views with strided rows in the following kernels."""
    write_llama(tmp_path)
    activations = Activations.none if scheme == "int8" else Activations.dynamic
    run = run_config(tmp_path)
    quant = QuantConfig(QuantScheme[scheme], activations=activations)
    run = replace(run, quant=quant, device=replace(run.device, block_size=4))
    expected = tokens(load_engine(run, 3))
    monkeypatch.setattr(kernels.linear, "_on_gpu", lambda tensor: True)
    engine = load_engine(run, 3)
    for layer in engine.executor.model.get_submodule("model.layers"):
        assert layer.self_attn.qkv.is_merged
        assert layer.mlp.gate_up.is_merged
    assert tokens(padded(engine, monkeypatch)) == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("scheme", ["int4", "a8w8", "fp8"])
def test_so_does_one_with_quantised_experts(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    activations = Activations.none if scheme == "int4" else Activations.dynamic
    quant = QuantConfig(QuantScheme[scheme], activations=activations, skip=["*self_attn*", "lm_head"])
    run = run_config(GOLDENS / "mixtral")
    run = replace(run, quant=quant, device=replace(run.device, block_size=4))
    expected = tokens(load_engine(run, 3))
    monkeypatch.setattr(kernels.linear, "_on_gpu", lambda tensor: True)
    engine = load_engine(run, 3)
    assert all(module.is_merged for module in engine.executor.model.modules() if isinstance(module, Experts))
    assert tokens(padded(engine, monkeypatch)) == expected


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_so_does_one_whose_rows_have_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with adapters of different ranks, and a row without: three rows, padded to four."""
    write_llama(tmp_path / "base")
    names, layers = ["fr", None, "de"], ["o_proj", "down_proj"]
    for rank, name in ((3, "fr"), (20, "de")):
        write_adapter(tmp_path / name, tmp_path / "base", LlamaForCausalLM, r=rank, target_modules=layers)

    def engine() -> Engine:
        run = run_config(tmp_path / "base")
        run = replace(run, device=replace(run.device, block_size=4))
        return load_with(run, {name: tmp_path / name for name in names if name}, 3)

    rows = list(zip(PROMPTS, names, strict=True))
    expected = outputs(engine(), rows, DECODE)
    assert outputs(padded(engine(), monkeypatch), rows, DECODE) == expected
    plain = outputs(engine(), [(prompt, None) for prompt in PROMPTS], DECODE)
    assert [a == b for a, b in zip(expected, plain, strict=True)] == [False, True, False]

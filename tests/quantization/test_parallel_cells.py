"""Every scheme with every format of the cache in a model whose ranks are threads: the bits of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, Phi3ForCausalLM

from conf.quantization import Activations, KVCacheFormat, QuantConfig
from conf.schema import DType, RunConfig
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.divided import assert_same_bits, divided_steps, whole_steps
from tests.helpers.goldens import FAMILIES
from tests.helpers.oracle import random_prompts, write_model
from tests.helpers.quantized_models import (
    CALIBRATED,
    FP8,
    INT4,
    INT8,
    STATIC_CACHES,
    make,
    quantize_run,
    random_rows,
    write_rows,
)
from tests.models.test_model_parts import OTHERS, write_family
from tests.models.test_parallel import DEEPSEEK, prompts_for
from tests.quantization.test_cells import CACHES, SCHEMES

EVERY = {
    **SCHEMES,
    "int8 auto": QuantConfig(INT8, activations=Activations.auto),
    "int4, whole rows": QuantConfig(INT4, symmetric=False),
    "int4 gptq, act-order": replace(CALIBRATED["int4 gptq, groups on the way"], overrides={}),
    "fp8 per tensor": QuantConfig(FP8, activations=Activations.dynamic, per_tensor=True),
    "fp8 static per tensor": CALIBRATED["fp8 static per tensor"],
}
PROMPTS = random_prompts(96, (5, 1, 40))
RANKS = (2, 3, 4)
SIZES = {"intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    write_llama(folder / "float", **SIZES)
    write_rows(folder / "rows.jsonl", random_rows(20, 16))
    return folder


def run_of(scheme: str, kv_cache: str, folder: Path) -> RunConfig:
    """A scheme that needs calibration is calibrated the first time."""
    quant, source = replace(EVERY[scheme], **CACHES[kv_cache]), folder / "float"
    if quant.needs_calibration:
        source = folder / (f"{scheme} {kv_cache}" if quant.has_static_kv_cache else scheme)
        if not source.exists():
            made = quant if quant.has_static_kv_cache else EVERY[scheme]
            make(quantize_run(folder / "float", made, source, folder / "rows.jsonl"), folder / "run")
        quant = QuantConfig() if quant.has_static_kv_cache else QuantConfig(kv_cache=quant.kv_cache)
    return replace(run_config(source), quant=quant)


def cells() -> list[Any]:
    """Those that `make test` runs have every scheme and every cache, with each number of ranks."""
    every = [
        (scheme, cache, tp)
        for scheme in EVERY
        for cache in CACHES
        for tp in RANKS
        if not (
            scheme == "int8 auto" and cache in STATIC_CACHES
        )  # which is a setting of runs, not of what is quantised
    ]
    fast = {(scheme, list(CACHES)[i % len(CACHES)], RANKS[i % len(RANKS)]) for i, scheme in enumerate(EVERY)}
    return [pytest.param(*cell, marks=[] if cell in fast else pytest.mark.long) for cell in every]


@pytest.mark.parametrize(("scheme", "kv_cache", "tp"), cells())
def test_ranks_have_the_bits_of_one_process(scheme: str, kv_cache: str, tp: int, models: Path) -> None:
    run = run_of(scheme, kv_cache, models)
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, tp, PROMPTS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "kv_cache"),
    [("int8", "int8"), ("int4, whole rows", "int4"), ("a8w8 dynamic", "fp8"), ("fp8 dynamic", "int8")],
)
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS, *DEEPSEEK])
def test_families(name: str, scheme: str, kv_cache: str, tmp_path: Path) -> None:
    """Whatever a family's layers are: joined, in pieces, of latents, of experts."""
    write_family(tmp_path, name)
    prompts = prompts_for(name)
    quant = replace(EVERY[scheme], **CACHES[kv_cache])
    run = replace(run_config(tmp_path, allow_pickle=True), quant=quant)
    whole = whole_steps(run, prompts)
    for tp in (2,) if name == "chatglm_28layers" else (2, 3):
        assert_same_bits(whole, divided_steps(run, tp, prompts))


def test_an_adapter_of_a_smoothed_model(models: Path, tmp_path: Path) -> None:
    """Its factors are divided by the scales of all outputs, and then cut."""
    run = run_of("a8w8 smoothquant", KVCacheFormat.none.name, models)
    write_adapter(tmp_path, models / "float", LlamaForCausalLM, r=3, target_modules=ALL_LINEAR)
    run = replace(run, model=replace(run.model, adapters={"one": str(tmp_path)}))
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, 3, PROMPTS))


@pytest.mark.parametrize("scheme", ["a8w8 dynamic", "fp8 dynamic"])
def test_a_fused_gate_gives_pieces_in_floats(scheme: str, tmp_path: Path) -> None:
    """The scale of a row's codes is that of all its channels."""
    write_model(tmp_path, Phi3ForCausalLM, pad_token_id=0, eos_token_id=1)
    run = replace(run_config(tmp_path), quant=EVERY[scheme])
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, 2, PROMPTS))


@pytest.mark.parametrize("scheme", ["int8", "int4, zero points", "a8w8 dynamic", "fp8 dynamic"])
def test_in_bfloat16(scheme: str, models: Path) -> None:
    run = run_of(scheme, KVCacheFormat.none.name, models)
    run = replace(run, model=replace(run.model, dtype=DType.bfloat16))
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, 3, PROMPTS))

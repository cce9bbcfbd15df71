"""Every scheme with every format of the cache in a model whose ranks are threads: the bits of one process."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM, Phi3ForCausalLM

from conf.quantization import KVCacheFormat, QuantConfig
from conf.schema import DType, RunConfig
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import DEEPSEEK, OTHERS, PROMPTS, prompts_for, write_family
from tests.helpers.catalog import GOLDEN_FAMILIES as FAMILIES
from tests.helpers.divided import LAYER_KINDS, assert_same_bits, divided_steps, whole_steps
from tests.helpers.oracle import write_model
from tests.helpers.quantized_models import (
    CACHES,
    EVERY,
    STATIC_CACHES,
    make,
    quantize_run,
    random_rows,
    write_rows,
)
from tests.helpers.tiers import in_turn, tiers

RANKS = (2, 3, 4)
SIZES = {"intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    write_llama(folder / "float", **SIZES)
    write_rows(folder / "rows.jsonl", random_rows(20, 16))
    return folder


def run_of(scheme: str, kv_cache: str, folder: Path) -> RunConfig:
    """Return a run of the scheme, which is calibrated at its first use."""
    quant, source = replace(EVERY[scheme], **CACHES[kv_cache]), folder / "float"
    if quant.needs_calibration:
        source = folder / (f"{scheme} {kv_cache}" if quant.has_static_kv_cache else scheme)
        if not source.exists():
            made = quant if quant.has_static_kv_cache else EVERY[scheme]
            make(quantize_run(folder / "float", made, source, folder / "rows.jsonl"), folder / "run")
        quant = QuantConfig() if quant.has_static_kv_cache else QuantConfig(kv_cache=quant.kv_cache)
    return replace(run_config(source), quant=quant)


CELLS = [
    (scheme, cache, tp)
    for scheme, cache, tp in product(EVERY, CACHES, RANKS)
    if not (scheme == "int8 auto" and cache in STATIC_CACHES)  # a setting of runs, not of the quantised files
]
# A weight format and a cache format share no code: each scheme is sharded for all numbers of ranks, each time with
# another cache format.
QUICK, *LONG = (in_turn(EVERY, CACHES, RANKS, first=first) for first in (4, 8, 15))


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "kv_cache", "tp"), tiers(CELLS, QUICK, sum(LONG, [])))
def test_ranks_have_the_bits_of_one_process(scheme: str, kv_cache: str, tp: int, models: Path) -> None:
    run = run_of(scheme, kv_cache, models)
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, tp, PROMPTS))


MODELS = [*FAMILIES, *OTHERS, *DEEPSEEK]
QUANTS = [("int8", "int8"), ("int4, whole rows", "int4"), ("a8w8 dynamic", "fp8"), ("fp8 dynamic", "int8")]


def check_family(name: str, scheme: str, kv_cache: str, numbers: tuple[int, ...], folder: Path) -> None:
    (folder / name).mkdir()
    write_family(folder / name, name)
    prompts = prompts_for(name)
    quant = replace(EVERY[scheme], **CACHES[kv_cache])
    run = replace(run_config(folder / name, allow_pickle=True), quant=quant)
    expected = whole_steps(run, prompts)
    for tp in numbers:
        assert_same_bits(expected, divided_steps(run, tp, prompts))


def numbers_of(name: str) -> tuple[int, ...]:
    return (2,) if name == "chatglm_28layers" else (2, 3)  # has two heads


@pytest.mark.long
@pytest.mark.parametrize(("scheme", "kv_cache"), QUANTS)
@each("name", LAYER_KINDS.values())
def test_kinds_of_layers(name: str, scheme: str, kv_cache: str, tmp_path: Path) -> None:
    """Dense layers, fused layers, latents and experts."""
    check_family(name, scheme, kv_cache, (2, 3), tmp_path)


@pytest.mark.long
@each("name, quant", in_turn(MODELS, QUANTS))
def test_families(name: str, quant: tuple[str, str], tmp_path: Path) -> None:
    check_family(name, *quant, numbers_of(name)[-1:], tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("scheme", "kv_cache"), QUANTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_family(name: str, scheme: str, kv_cache: str, tmp_path: Path) -> None:
    check_family(name, scheme, kv_cache, numbers_of(name), tmp_path)


def test_an_adapter_of_a_smoothed_model(models: Path, tmp_path: Path) -> None:
    """Its factors are divided by the scales of all outputs, and then sharded."""
    run = run_of("a8w8 smoothquant", KVCacheFormat.none.name, models)
    write_adapter(tmp_path, models / "float", LlamaForCausalLM, r=3, target_modules=ALL_LINEAR)
    run = replace(run, model=replace(run.model, adapters={"one": str(tmp_path)}))
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, 3, PROMPTS))


@each("scheme", ["a8w8 dynamic", "fp8 dynamic"])
def test_a_fused_gate_gives_pieces_in_floats(scheme: str, tmp_path: Path) -> None:
    """The scale of a row's codes covers all its channels."""
    write_model(tmp_path / scheme, Phi3ForCausalLM, pad_token_id=0, eos_token_id=1)
    run = replace(run_config(tmp_path / scheme), quant=EVERY[scheme])
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, 2, PROMPTS))


@each("scheme", ["int8", "int4, zero points", "a8w8 dynamic", "fp8 dynamic"])
def test_in_bfloat16(scheme: str, models: Path) -> None:
    run = run_of(scheme, KVCacheFormat.none.name, models)
    run = replace(run, model=replace(run.model, dtype=DType.bfloat16))
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, 3, PROMPTS))

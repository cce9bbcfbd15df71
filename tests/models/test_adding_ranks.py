"""Ranks that add their products (parallel.sum=reduce): one process's greedy tokens in float32, and equal bits on all
ranks and in every run."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from conf.quantization import QuantConfig
from conf.schema import DType, ParallelConfig, ParallelMode, RunConfig, Sum
from kernels import build as build_kernels
from kernels.collectives import Threads
from models.layers.linear import Linear
from models.layers.tensor_parallel import RowParallelReduce
from models.sharding import ParallelLayout
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES as FAMILIES
from tests.helpers.catalog import OTHERS, PROMPTS, prompts_for, write_family
from tests.helpers.divided import (
    LAYER_KINDS,
    Step,
    assert_same_bits,
    assert_same_tokens,
    divided_steps,
    rank_plan,
    stage_steps,
    whole_steps,
)
from tests.helpers.quantized_models import EVERY, INT4, INT8, make, quantize_run, random_rows, write_rows
from tests.helpers.rank_threads import run_ranks
from tests.helpers.tiers import tiers

MODELS = [*FAMILIES, *OTHERS, "v2", "v3"]
CHOSEN = [*LAYER_KINDS.values(), "mixtral", "v2", "gpt2"]
BOTH = {"o_proj", "down_proj"}


def adding(run: RunConfig, tp: int) -> RunConfig:
    return replace(run, parallel=ParallelConfig(ParallelMode.tp, tp=tp, sum=Sum.reduce))


def layers_that_add(ranks: list[list[Step]]) -> set[str]:
    """Return the last parts of the names of layers that add, which are equal on all ranks."""
    (layer_names,) = {
        frozenset(
            name.rpartition(".")[2]
            for name, module in steps[0].model.named_modules()
            if isinstance(module, Linear) and isinstance(module.row_parallel, RowParallelReduce)
        )
        for steps in ranks
    }
    return set(layer_names)


@each("tp", [2, 3, 4])
def test_llama(tp: int, tmp_path: Path) -> None:
    """With 4 query and 2 key heads, and biases, which are added once."""
    write_llama(tmp_path / str(tp), attention_bias=True, mlp_bias=True)
    run = run_config(tmp_path / str(tp))
    expected, ranks = whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS)
    assert_same_tokens(expected, ranks)
    assert layers_that_add(ranks) == BOTH
    again = divided_steps(adding(run, tp), tp, PROMPTS)
    assert all(one.logits.equal(other.logits) for one, other in zip(ranks[0], again[0], strict=True))
    assert any(not one.logits.equal(other.logits) for one, other in zip(ranks[0], expected, strict=True))


@each("heads, keys, tp", [(7, 1, 5), (15, 5, 4)])
def test_odd_numbers_of_heads(heads: int, keys: int, tp: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 10 * heads, "head_dim": 12, "intermediate_size": 75, "vocab_size": 101}
    write_llama(tmp_path / str(heads), num_attention_heads=heads, num_key_value_heads=keys, **sizes)
    run = run_config(tmp_path / str(heads))
    assert_same_tokens(whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS))


@pytest.mark.parametrize("name", tiers(MODELS, CHOSEN))
def test_families(name: str, tmp_path: Path) -> None:
    """Layers of one kind add alike, whatever the family."""
    write_family(tmp_path, name)
    prompts = prompts_for(name)
    run = run_config(tmp_path, allow_pickle=True)
    expected = whole_steps(run, prompts)
    for tp in (2,) if name == "chatglm_28layers" else (2, 3):  # has two heads
        ranks = divided_steps(adding(run, tp), tp, prompts)
        assert_same_tokens(expected, ranks)
        assert layers_that_add(ranks) == {
            name.rpartition(".")[2]
            for name, module in ranks[0][0].model.named_modules()
            if isinstance(module, Linear) and module.row_parallel
        }


@each("pp", [2, 3])
def test_stages(pp: int, tmp_path: Path) -> None:
    write_llama(tmp_path / str(pp), num_hidden_layers=3)
    run = run_config(tmp_path / str(pp))
    assert_same_tokens(whole_steps(run, PROMPTS), stage_steps(adding(run, 2), 2, pp, PROMPTS))


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    parts = [(torch.randn(7, 33) * 10.0**rank).to(dtype) for rank in (3, 0, 1, 2, 0)]
    expected = np.zeros((7, 33), np.float32)
    for part in parts:
        expected = expected + part.float().numpy()
    for total in run_ranks(5, lambda group: RowParallelReduce(group).combine_outputs(parts[group.rank])):
        assert total.dtype == dtype
        assert total.equal(torch.from_numpy(expected).to(dtype))


def test_in_bfloat16(tmp_path: Path) -> None:
    """A rank's product is rounded once more than one process's: off by a few units of 8 bits."""
    write_llama(tmp_path)
    run = run_config(tmp_path)
    run = replace(run, model=replace(run.model, dtype=DType.bfloat16))
    ranks = divided_steps(adding(run, 3), 3, PROMPTS)
    for step, rank_step in zip(whole_steps(run, PROMPTS), ranks[0], strict=True):
        error = (rank_step.logits.float() - step.logits.float()).abs().max() / step.logits.float().abs().max()
        assert error < 8 * torch.finfo(torch.bfloat16).eps
    assert all(step.hidden.equal(first.hidden) for steps in ranks for step, first in zip(steps, ranks[0], strict=True))


SUMS = {
    "int8": (QuantConfig(INT8), 2, BOTH),
    "int8, odd parts": (QuantConfig(INT8), 3, BOTH),
    "int8, groups that attention has whole": (QuantConfig(INT8, group_size=32), 2, {"o_proj"}),
    "int4, zero points": (QuantConfig(INT4, group_size=32, symmetric=False), 2, {"o_proj"}),
    "int4, groups that the feed-forward layer has whole": (QuantConfig(INT4, group_size=32), 3, {"down_proj"}),
}


@each("case", SUMS)
def test_codes(case: str, tmp_path: Path) -> None:
    """Each layer adds if its groups can be sharded: attention's inputs are 64 in heads of 16, the feed-forward layer's
    inputs are 96."""
    quant, tp, adding_layers = SUMS[case]
    write_llama(tmp_path / case, intermediate_size=96)
    run = replace(run_config(tmp_path / case), quant=quant)
    expected, ranks = whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS)
    assert layers_that_add(ranks) == adding_layers
    # with 16-bit rows, whose scale covers up to 128 inputs of a rank
    assert_same_tokens(expected, ranks, tolerance=1e-3)


CALIBRATED_SUMS = {  # layers that gather have one process's bits
    "int4 gptq": BOTH,
    "int4 gptq, act-order": set(),
    "a8w8 static": BOTH,
    "a8w8 dynamic": set(),
    "fp8 static": BOTH,
    "int8 auto": set(),
}


@pytest.mark.parametrize("scheme", tiers(CALIBRATED_SUMS, ["a8w8 static", "int8 auto"], CALIBRATED_SUMS))
def test_schemes(scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llama(tmp_path / "float", intermediate_size=128)
    quant, folder = EVERY[scheme], tmp_path / "float"
    if quant.needs_calibration:
        write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
        folder, quant = tmp_path / "quantised", QuantConfig()
        make(quantize_run(tmp_path / "float", EVERY[scheme], folder, tmp_path / "rows.jsonl"), tmp_path / "run")
    run = replace(run_config(folder), quant=quant)
    with caplog.at_level(logging.WARNING):
        expected, ranks = whole_steps(run, PROMPTS), divided_steps(adding(run, 2), 2, PROMPTS)
    adds = CALIBRATED_SUMS[scheme]
    assert layers_that_add(ranks) == adds
    said = [record.getMessage() for record in caplog.records if "parallel.sum" in record.getMessage()]
    if adds:
        # With static activations a last bit may round a value to the other code, which changes logits by hundredths.
        assert_same_tokens(expected, ranks, tolerance=5e-2 if "static" in scheme else 1e-3)
        assert said == []
    else:
        assert_same_bits(expected, ranks)
        assert said[0].startswith(
            "parallel.sum=reduce: 4 of 4 layers gather their inputs, because the groups, blocks or order of"
        )


def test_adapters(tmp_path: Path) -> None:
    write_llama(tmp_path / "base")
    write_adapter(tmp_path / "one", tmp_path / "base", LlamaForCausalLM, r=5, target_modules=ALL_LINEAR)
    run = run_config(tmp_path / "base")
    run = replace(run, model=replace(run.model, adapters={"one": str(tmp_path / "one")}))
    expected = whole_steps(run, PROMPTS)
    for tp in (2, 3):
        assert_same_tokens(expected, divided_steps(adding(run, tp), tp, PROMPTS))


@pytest.mark.skipif(build_kernels.library() is None, reason="weights are packed where the C++ kernels are")
def test_kept_files_match_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    write_llama(tmp_path / "base")
    run = run_config(tmp_path / "base", keep_packed=True)
    gathered, added = divided_steps(run, 2, PROMPTS), divided_steps(adding(run, 2), 2, PROMPTS)
    assert len([*(tmp_path / "packed").glob("*.safetensors")]) == 4
    for one, other in ((run, gathered), (adding(run, 2), added)):
        adding_step = divided_steps(one, 2, PROMPTS)[0]
        assert all(step.logits.equal(before.logits) for step, before in zip(adding_step, other[0], strict=True))


def test_a_rank_reads_the_columns_of_its_inputs(tmp_path: Path) -> None:
    write_llama(tmp_path)
    run, group = adding(run_config(tmp_path), 2), Threads.of(2)[1]
    (file,) = rank_plan(run, ParallelLayout(2, 1, 1, 0, adds=True), group).files
    name = "model.layers.1.mlp.down_proj.weight"  # [64, 88], of which a rank has whole steps of 16 columns
    weight = load_file(tmp_path / "model.safetensors")[name]
    assert file.shapes[name] == (64, 40)
    assert dict(file.read([name]))[name].equal(weight[:, 48:])

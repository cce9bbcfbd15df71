"""Ranks that add what their inputs give: one process's greedy tokens in float32, and the same bits on all ranks and in every run."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from conf.quantization import QuantConfig
from conf.schema import DType, ParallelConfig, ParallelMode, RunConfig, Sum
from kernels import build as build_kernels
from kernels.collectives import Threads
from models.cuts import Division
from models.layers.linear import Linear
from models.layers.pieces import RowSum
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.deepseek import CASES
from tests.helpers.divided import Step, assert_same_bits, divided_steps, rank_plan, stage_steps, whole_steps
from tests.helpers.goldens import FAMILIES
from tests.helpers.oracle import random_prompts
from tests.helpers.quantized_models import INT4, INT8, make, quantize_run, random_rows, write_rows
from tests.helpers.rank_threads import run_ranks
from tests.models.test_model_parts import OTHERS, write_family
from tests.models.test_parallel import prompts_for
from tests.quantization.test_parallel_cells import EVERY

PROMPTS = random_prompts(96, (5, 1, 40))
FAST = ("qwen2", "mixtral", "v2", "v3", "gpt2", "bloom")
BOTH = {"o_proj", "down_proj"}


def adding(run: RunConfig, tp: int) -> RunConfig:
    return replace(run, parallel=ParallelConfig(ParallelMode.tp, tp=tp, sum=Sum.reduce))


def assert_same_tokens(whole: list[Step], ranks: list[list[Step]], tolerance: float = 1e-4) -> None:
    """Each position's likeliest token is one process's; all ranks have the same hidden states.

    The tolerance, a share of the largest logit, is for sums of some hundred float32 numbers in another order, through a few layers.
    """
    for step, of_ranks in zip(whole, zip(*ranks, strict=True), strict=True):
        logits = of_ranks[0].logits
        assert logits.argmax(-1).equal(step.logits.argmax(-1))
        assert (logits - step.logits).abs().max() <= tolerance * step.logits.abs().max()
        assert all(own.hidden.equal(of_ranks[0].hidden) for own in of_ranks)


def layers_that_add(ranks: list[list[Step]]) -> set[str]:
    """The last parts of their names, which are the same on all ranks."""
    (found,) = {
        frozenset(
            name.rpartition(".")[2]
            for name, module in steps[0].model.named_modules()
            if isinstance(module, Linear) and isinstance(module.pieces, RowSum)
        )
        for steps in ranks
    }
    return set(found)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_llama(tp: int, tmp_path: Path) -> None:
    """Of 4 query and 2 key heads, with biases, which are added once."""
    write_llama(tmp_path, attention_bias=True, mlp_bias=True)
    run = run_config(tmp_path)
    whole, ranks = whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS)
    assert_same_tokens(whole, ranks)
    assert layers_that_add(ranks) == BOTH
    again = divided_steps(adding(run, tp), tp, PROMPTS)
    assert all(one.logits.equal(other.logits) for one, other in zip(ranks[0], again[0], strict=True))
    assert any(not one.logits.equal(other.logits) for one, other in zip(ranks[0], whole, strict=True))


@pytest.mark.parametrize(("heads", "keys", "tp"), [(7, 1, 5), (15, 5, 4)])
def test_odd_numbers_of_heads(heads: int, keys: int, tp: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 10 * heads, "head_dim": 12, "intermediate_size": 75, "vocab_size": 101}
    write_llama(tmp_path, num_attention_heads=heads, num_key_value_heads=keys, **sizes)
    run = run_config(tmp_path)
    assert_same_tokens(whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS))


def cases() -> list[Any]:
    names = [name for name in (*FAMILIES, *OTHERS, *CASES) if name in FAST or not name.startswith("v")]
    every = [(name, tp) for name in names for tp in (2, 3) if not (name == "chatglm_28layers" and tp > 2)]
    return [pytest.param(*case, marks=[] if case[0] in FAST else pytest.mark.long) for case in every]


@pytest.mark.parametrize(("name", "tp"), cases())
def test_families(name: str, tp: int, tmp_path: Path) -> None:
    write_family(tmp_path, name)
    prompts = prompts_for(name)
    run = run_config(tmp_path, allow_pickle=True)
    ranks = divided_steps(adding(run, tp), tp, prompts)
    assert_same_tokens(whole_steps(run, prompts), ranks)
    assert layers_that_add(ranks) == {
        name.rpartition(".")[2]
        for name, module in ranks[0][0].model.named_modules()
        if isinstance(module, Linear) and module.pieces
    }


@pytest.mark.parametrize("pp", [2, 3])
def test_stages(pp: int, tmp_path: Path) -> None:
    write_llama(tmp_path, num_hidden_layers=3)
    run = run_config(tmp_path)
    assert_same_tokens(whole_steps(run, PROMPTS), stage_steps(adding(run, 2), 2, pp, PROMPTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(7, 33) * 10.0**rank).to(dtype) for rank in (3, 0, 1, 2, 0)]
    expected = np.zeros((7, 33), np.float32)
    for part in parts:
        expected = expected + part.float().numpy()
    for found in run_ranks(5, lambda group: RowSum(group).whole(parts[group.rank])):
        assert found.dtype == dtype
        assert found.equal(torch.from_numpy(expected).to(dtype))


def test_in_bfloat16(tmp_path: Path) -> None:
    """What a rank gives is rounded once more than what one process gives: off by a few of 8 bits."""
    write_llama(tmp_path)
    run = run_config(tmp_path)
    run = replace(run, model=replace(run.model, dtype=DType.bfloat16))
    ranks = divided_steps(adding(run, 3), 3, PROMPTS)
    for step, own in zip(whole_steps(run, PROMPTS), ranks[0], strict=True):
        error = (own.logits.float() - step.logits.float()).abs().max() / step.logits.float().abs().max()
        assert error < 8 * torch.finfo(torch.bfloat16).eps
    assert all(own.hidden.equal(first.hidden) for steps in ranks for own, first in zip(steps, ranks[0], strict=True))


SUMS = {
    "int8": (QuantConfig(INT8), 2, BOTH),
    "int8, odd parts": (QuantConfig(INT8), 3, BOTH),
    "int8, groups that attention has whole": (QuantConfig(INT8, group_size=32), 2, {"o_proj"}),
    "int4, zero points": (QuantConfig(INT4, group_size=32, symmetric=False), 2, {"o_proj"}),
    "int4, groups that the feed-forward layer has whole": (QuantConfig(INT4, group_size=32), 3, {"down_proj"}),
}


@pytest.mark.parametrize("case", SUMS)
def test_codes(case: str, tmp_path: Path) -> None:
    """Each layer adds where its groups can be divided: attention's inputs are 64 in heads of 16, the feed-forward layer's are 96."""
    quant, tp, expected = SUMS[case]
    write_llama(tmp_path, intermediate_size=96)
    run = replace(run_config(tmp_path), quant=quant)
    whole, ranks = whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS)
    assert layers_that_add(ranks) == expected
    # with rows of 16 bits, whose scale is that of up to 128 inputs of a rank
    assert_same_tokens(whole, ranks, tolerance=1e-3)


CALIBRATED_SUMS = {  # what gathers gives one process's bits
    "int4 gptq": BOTH,
    "int4 gptq, act-order": set(),
    "a8w8 static": BOTH,
    "a8w8 dynamic": set(),
    "fp8 static": BOTH,
    "int8 auto": set(),
}


@pytest.mark.parametrize("scheme", CALIBRATED_SUMS)
def test_schemes(scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llama(tmp_path / "float", intermediate_size=128)
    quant, folder = EVERY[scheme], tmp_path / "float"
    if quant.needs_calibration:
        write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
        folder, quant = tmp_path / "quantised", QuantConfig()
        make(quantize_run(tmp_path / "float", EVERY[scheme], folder, tmp_path / "rows.jsonl"), tmp_path / "run")
    run = replace(run_config(folder), quant=quant)
    with caplog.at_level(logging.WARNING):
        whole, ranks = whole_steps(run, PROMPTS), divided_steps(adding(run, 2), 2, PROMPTS)
    adds = CALIBRATED_SUMS[scheme]
    assert layers_that_add(ranks) == adds
    said = [record.getMessage() for record in caplog.records if "parallel.sum" in record.getMessage()]
    if adds:
        # Of static activations a last bit may round a value between two codes to the other one, which moves logits by hundredths.
        assert_same_tokens(whole, ranks, tolerance=5e-2 if "static" in scheme else 1e-3)
        assert said == []
    else:
        assert_same_bits(whole, ranks)
        assert said[0].startswith("parallel.sum=reduce: 4 of 4 layers gather, because the groups, blocks or order of")


@pytest.mark.parametrize("tp", [2, 3])
def test_adapters(tp: int, tmp_path: Path) -> None:
    write_llama(tmp_path / "base")
    write_adapter(tmp_path / "one", tmp_path / "base", LlamaForCausalLM, r=5, target_modules=ALL_LINEAR)
    run = run_config(tmp_path / "base")
    run = replace(run, model=replace(run.model, adapters={"one": str(tmp_path / "one")}))
    assert_same_tokens(whole_steps(run, PROMPTS), divided_steps(adding(run, tp), tp, PROMPTS))


@pytest.mark.skipif(build_kernels.library() is None, reason="weights are packed where the C++ kernels are")
def test_kept_files_are_those_of_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.packed_cache.FOLDER", tmp_path / "kept")
    write_llama(tmp_path / "base")
    run = run_config(tmp_path / "base", keep_packed=True)
    gathered, added = divided_steps(run, 2, PROMPTS), divided_steps(adding(run, 2), 2, PROMPTS)
    assert len([*(tmp_path / "kept").glob("*.safetensors")]) == 4
    for one, other in ((run, gathered), (adding(run, 2), added)):
        found = divided_steps(one, 2, PROMPTS)[0]
        assert all(step.logits.equal(before.logits) for step, before in zip(found, other[0], strict=True))


def test_a_rank_reads_the_columns_of_its_inputs(tmp_path: Path) -> None:
    write_llama(tmp_path)
    run, group = adding(run_config(tmp_path), 2), Threads.of(2)[1]
    (file,) = rank_plan(run, Division(2, 1, 1, 0, adds=True), group).files
    name = "model.layers.1.mlp.down_proj.weight"  # [64, 88], of which a rank has whole steps of 16 columns
    whole = load_file(tmp_path / "model.safetensors")[name]
    assert file.shapes[name] == (64, 40)
    assert dict(file.read([name]))[name].equal(whole[:, 48:])

"""Experts that are each on one rank: the bits of one process."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantScheme
from conf.schema import DType, ExpertPlacement, ParallelConfig, ParallelMode, RunConfig, Sum
from kernels.collectives import Threads
from models.layers.missing import MissingLayer
from models.layers.moe import Experts
from models.sharding import ParallelLayout
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import write_family
from tests.helpers.divided import (
    assert_same_bits,
    assert_same_tokens,
    divided_steps,
    rank_plan,
    stage_steps,
    whole_steps,
)
from tests.helpers.tiers import in_turn, tiers

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "v2", "v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "gpt_oss")
PROMPTS = [[*range(3, 40)], [5], [7, 3]]  # of one token, which leaves ranks without a row


def of_whole_experts(run: RunConfig, tp: int, sum: Sum = Sum.gather) -> RunConfig:
    return replace(run, parallel=ParallelConfig(ParallelMode.tp, tp=tp, experts=ExpertPlacement.whole, sum=sum))


RANKS, DTYPES = (2, 3), ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("name", "tp", "dtype"), tiers(product(MIXTURES, RANKS, DTYPES), quick=in_turn(MIXTURES, RANKS, DTYPES))
)
def test_families(name: str, tp: int, dtype: str, tmp_path: Path) -> None:
    write_family(tmp_path, name)
    run = run_config(tmp_path)
    run = replace(run, model=replace(run.model, dtype=DType[dtype]))
    ranks = divided_steps(of_whole_experts(run, tp), tp, PROMPTS)
    assert_same_bits(whole_steps(run, PROMPTS), ranks)
    owned = [numbers for steps in ranks for numbers in own_experts(steps[0].model)]
    assert sorted(sum(owned, [])) == [*range(len(sum(owned, [])))]
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def own_experts(model: Any) -> list[list[int]]:
    """The numbers of those that a rank has, of its last mixture."""
    *_, experts = (module for module in model.modules() if isinstance(module, Experts))
    return [[number for number, expert in enumerate(experts) if not isinstance(expert, MissingLayer)]]


QUANTS = {
    "int8": QuantConfig(QuantScheme.int8),
    "int8 auto": QuantConfig(QuantScheme.int8, activations=Activations.auto),
    "int4": QuantConfig(QuantScheme.int4, group_size=32),
    "a8w8": QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic),
    "fp8": QuantConfig(QuantScheme.fp8, activations=Activations.dynamic),
    "experts of two schemes": QuantConfig(QuantScheme.int8, overrides={"*experts.1.*": "int4"}),
}


@each("quant", QUANTS)
def test_schemes(quant: str, tmp_path: Path) -> None:
    """Those of two schemes are computed one after the other on a rank that has both."""
    (tmp_path / quant).mkdir()
    write_family(tmp_path / quant, "mixtral")
    run = replace(run_config(tmp_path / quant), quant=QUANTS[quant])
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(of_whole_experts(run, 3), 3, PROMPTS))


def test_stages(tmp_path: Path) -> None:
    write_family(tmp_path, "v3")  # whose first layer is no mixture
    run = run_config(tmp_path)
    assert_same_bits(whole_steps(run, PROMPTS), stage_steps(of_whole_experts(run, 2), 2, 2, PROMPTS))


@each("name", ["mixtral", "v3"])
def test_with_products_that_are_added(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    write_family(tmp_path / name, name)
    run = run_config(tmp_path / name)
    assert_same_tokens(whole_steps(run, PROMPTS), divided_steps(of_whole_experts(run, 3, Sum.reduce), 3, PROMPTS))


def test_a_rank_reads_its_experts_alone(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral")
    run = run_config(tmp_path)
    rank_shapes = []
    for rank, group in enumerate(Threads.of(3)):
        parallel_layout = ParallelLayout(3, 1, rank, 0, whole_experts=True)
        shapes = [shape for file in rank_plan(run, parallel_layout, group).files for shape in file.shapes.items()]
        rank_shapes += [(name, shape) for name, shape in shapes if "experts" in name]
    all_shapes = [
        item for file in rank_plan(run, ParallelLayout(), Threads.of(1)[0]).files for item in file.shapes.items()
    ]
    assert sorted(rank_shapes) == sorted((name, shape) for name, shape in all_shapes if "experts" in name)


def test_models_with_too_few_experts_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "dense")
    (tmp_path / "mixture").mkdir()
    write_family(tmp_path / "mixture", "mixtral")
    group = Threads.of(1)[0]
    with pytest.raises(UserError) as dense:
        rank_plan(run_config(tmp_path / "dense"), ParallelLayout(2, whole_experts=True), group)
    message = "parallel.experts=whole needs a mixture of experts, which this model does not have: leave it out"
    assert str(dense.value) == message
    with pytest.raises(UserError) as few:
        rank_plan(run_config(tmp_path / "mixture"), ParallelLayout(5, whole_experts=True), group)
    message = "tp=5 is more than the 4 experts of a layer of this model: give parallel.experts=split, or at most tp=4"
    assert str(few.value) == message

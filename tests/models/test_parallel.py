"""A model whose ranks are threads gives the bits of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from conf.errors import UserError
from conf.schema import DType, ModelConfig, RunConfig, Weights
from kernels.collectives import Threads
from models.cuts import Division
from models.layers.linear import Linear
from tests.helpers.builders import run_config, write_llama
from tests.helpers.deepseek import CASES, build
from tests.helpers.divided import assert_same_bits, divided_steps, plan_of, rank_plan, whole_steps
from tests.helpers.goldens import FAMILIES, GOLDENS, link
from tests.helpers.oracle import random_prompts, write_model
from tests.models.test_model_parts import OTHERS

PROMPTS = random_prompts(96, (5, 1, 40))
DEEPSEEK = ["v2", "v2_no_q_lora", "v2_biases_tied", "v3", "v3_yarn"]


def write_family(name: str, folder: Path) -> list[list[int]]:
    """The checkpoint, and prompts for it."""
    if name in CASES:
        version, config = CASES[name]
        build(version, **config).save_pretrained(folder)
    elif name in OTHERS:
        write_model(folder, OTHERS[name], pad_token_id=0, eos_token_id=1)
    else:
        link(name, folder)
        golden = GOLDENS / name / "golden.safetensors"
        if golden.is_file():
            return [load_file(golden)["input_ids"][0].tolist()]
    return [list(range(3, 12))]


def of_dtype(run: RunConfig, dtype: str) -> RunConfig:
    return replace(run, model=replace(run.model, dtype=DType[dtype]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_llama(tp: int, dtype: str, tmp_path: Path) -> None:
    """Of 4 query and 2 key heads: a rank with a key, two ranks that share one beside one that does not, two that share each."""
    write_llama(tmp_path)
    run = of_dtype(run_config(tmp_path), dtype)
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, tp, PROMPTS))


@pytest.mark.parametrize(("heads", "keys", "tp"), [(7, 1, 5), (15, 5, 3), (15, 5, 4), (6, 3, 6)])
def test_odd_numbers_of_heads(heads: int, keys: int, tp: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 10 * heads, "head_dim": 12, "intermediate_size": 75, "vocab_size": 101}
    write_llama(tmp_path, num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=True, **sizes)
    run = run_config(tmp_path)
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, tp, PROMPTS))


def cases() -> list[Any]:
    every = [
        (name, tp, dtype)
        for name in (*FAMILIES, *OTHERS, *DEEPSEEK)
        for tp in (2, 3, 4)
        for dtype in ("float32", "bfloat16")
        if not (name == "chatglm_28layers" and tp > 2)  # which has two heads
    ]
    return [pytest.param(*case, marks=[] if case[1:] == (2, "float32") else pytest.mark.long) for case in every]


@pytest.mark.parametrize(("name", "tp", "dtype"), cases())
def test_families(name: str, tp: int, dtype: str, tmp_path: Path) -> None:
    prompts = write_family(name, tmp_path)
    run = of_dtype(run_config(tmp_path, allow_pickle=True), dtype)
    assert_same_bits(whole_steps(run, prompts), divided_steps(run, tp, prompts))


def test_ranks_divide_the_weights(tmp_path: Path) -> None:
    """Of the linear layers, the embedding and the head each rank has its part, of the norms all."""
    write_llama(tmp_path, attention_bias=True)
    run = run_config(tmp_path)
    whole = {name: parameter.numel() for name, parameter in plan_of(run).model.named_parameters()}
    ranks = [
        {name: parameter.numel() for name, parameter in rank_plan(run, Division(3, 1, group.rank), group).model.named_parameters()}
        for group in Threads.of(3)
    ]  # fmt: skip
    shared = {name for name in whole if "norm" not in name}
    keys = {name for name in shared if "k_proj" in name or "v_proj" in name}  # of two heads for three ranks
    for name, count in whole.items():
        found = [rank[name] for rank in ranks]
        if name in keys:
            assert found == [count // 2] * 3
        else:
            assert sum(found) == count if name in shared else found == [count] * 3, name


def test_pieces_are_joined_where_heads_and_channels_are_read(tmp_path: Path) -> None:
    write_llama(tmp_path)
    model = rank_plan(run_config(tmp_path), Division(2), Threads.of(2)[0]).model
    joined = {
        name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, Linear) and layer.pieces
    }
    assert joined == {"o_proj", "down_proj"}


def test_one_rank_is_the_whole_model(tmp_path: Path) -> None:
    write_llama(tmp_path)
    run = run_config(tmp_path)
    plan = rank_plan(run, Division(), Threads.of(1)[0])
    assert plan.model.embedding.words is None
    assert [type(file) for file in plan.files] == [type(file) for file in plan_of(run).files]


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    run, group = run_config(tmp_path), Threads.of(1)[0]
    with pytest.raises(UserError, match="tp=5 is more than the 4 query heads of this model: give at most 4"):
        rank_plan(run, Division(5), group)
    with pytest.raises(
        UserError, match="model.weights=random makes other weights in parts than whole: give a checkpoint"
    ):
        rank_plan(replace(run, model=ModelConfig(str(tmp_path), weights=Weights.random)), Division(2), group)

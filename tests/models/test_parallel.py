"""A model whose ranks are threads has the bits of one process."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from conf.errors import UserError
from conf.schema import DType, ModelConfig, RunConfig, Weights
from kernels import build as build_kernels
from kernels.collectives import Threads
from kernels.linear import FloatWeight, compressed
from models.layers.linear import Linear
from models.sharding import ParallelLayout
from pipelines.loading.device import prepare_device
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.shard_plan import shard_plan
from tests.helpers.adapters import ALL_LINEAR, change_adapter, write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import DEEPSEEK, OTHERS, PROMPTS, prompts_for, write_family
from tests.helpers.catalog import FAMILIES as EVERY
from tests.helpers.catalog import GOLDEN_FAMILIES as FAMILIES
from tests.helpers.deepseek import NextTokenReference
from tests.helpers.divided import (
    LAYER_KINDS,
    assert_same_bits,
    divided_steps,
    plan_of,
    rank_plan,
    stage_steps,
    whole_steps,
)
from tests.helpers.tiers import tiers

MODELS = [*FAMILIES, *OTHERS, *DEEPSEEK]


def of_dtype(run: RunConfig, dtype: str) -> RunConfig:
    return replace(run, model=replace(run.model, dtype=DType[dtype]))


@each("dtype", ["float32", "bfloat16", "float16"])
def test_llama(dtype: str, tmp_path: Path) -> None:
    """With 4 query and 2 key heads: a rank with a key head, two ranks that share one next to a rank that does not, and
    two pairs that share."""
    write_llama(tmp_path / dtype)
    run = of_dtype(run_config(tmp_path / dtype), dtype)
    expected = whole_steps(run, PROMPTS)
    for tp in (2, 3, 4):
        assert_same_bits(expected, divided_steps(run, tp, PROMPTS))


@each("heads, keys, tp", [(7, 1, 5), (15, 5, 3), (15, 5, 4), (6, 3, 6)])
def test_odd_numbers_of_heads(heads: int, keys: int, tp: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 10 * heads, "head_dim": 12, "intermediate_size": 75, "vocab_size": 101}
    folder = tmp_path / f"{heads} heads, {keys} keys, tp={tp}"
    write_llama(folder, num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=True, **sizes)
    run = run_config(folder)
    assert_same_bits(whole_steps(run, PROMPTS), divided_steps(run, tp, PROMPTS))


def test_adapters(tmp_path: Path) -> None:
    """Including adapters of the head, and of layers that gather."""
    write_llama(tmp_path / "base")
    modules = [*ALL_LINEAR, "lm_head"]
    write_adapter(tmp_path / "one", tmp_path / "base", LlamaForCausalLM, r=5, target_modules=modules)
    copies = [name for name in load_file(tmp_path / "one" / "adapter_model.safetensors") if "lora" not in name]
    change_adapter(tmp_path / "one", {}, dict.fromkeys(copies))  # PEFT's copy of the head next to its factors
    plain = run_config(tmp_path / "base")
    run = replace(plain, model=replace(plain.model, adapters={"one": str(tmp_path / "one")}))
    expected = whole_steps(run, PROMPTS)
    assert not expected[0].logits.equal(whole_steps(plain, PROMPTS[:1])[0].logits)
    for tp in (2, 3):
        assert_same_bits(expected, divided_steps(run, tp, PROMPTS))


@pytest.mark.skipif(
    build_kernels.library() is None or build_kernels.instruction_set() == "avx2",
    reason="weights are compressed for AVX-512 and AMX",
)
def test_weights_of_12_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank compresses its own part."""
    monkeypatch.setattr(compressed, "MIN_BYTES", 0)
    write_llama(tmp_path)
    run = of_dtype(run_config(tmp_path), "bfloat16")
    expected, ranks = whole_steps(run, PROMPTS), divided_steps(run, 3, PROMPTS)
    for model in (expected[0].model, *(steps[0].model for steps in ranks)):
        weights = [layer.method.weight for layer in model.modules() if isinstance(layer, Linear)]
        assert any(isinstance(weight, FloatWeight) and weight.is_compressed for weight in weights)
    assert_same_bits(expected, ranks)


@pytest.mark.skipif(build_kernels.library() is None, reason="weights are packed where the C++ kernels are")
def test_each_part_is_kept_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    write_llama(tmp_path / "base", attention_bias=True)
    run = run_config(tmp_path / "base", keep_packed=True)
    expected = whole_steps(run, PROMPTS)
    for num_parts in (3, 3):  # written, and found
        assert_same_bits(expected, divided_steps(run, 2, PROMPTS))
        assert len([*(tmp_path / "packed").glob("*.safetensors")]) == num_parts


def layouts_of(name: str) -> list[tuple[int, str]]:
    """Return every number of ranks in each dtype; for chatglm_28layers, which has two heads, two ranks."""
    numbers = (2,) if name == "chatglm_28layers" else (2, 3, 4)
    return [(tp, dtype) for tp in numbers for dtype in ("float32", "bfloat16")]


def check_layouts(name: str, parallel_layouts: list[tuple[int, str]], folder: Path) -> None:
    write_family(folder, name)
    run, prompts = run_config(folder, allow_pickle=True), prompts_for(name)
    expected = {dtype: whole_steps(of_dtype(run, dtype), prompts) for dtype in {dtype for _, dtype in parallel_layouts}}
    for tp, dtype in parallel_layouts:
        assert_same_bits(expected[dtype], divided_steps(of_dtype(run, dtype), tp, prompts))


@pytest.mark.parametrize("name", tiers(MODELS, quick=[*LAYER_KINDS.values()], long=MODELS))
def test_families(name: str, tmp_path: Path) -> None:
    """Each family in one layout; all families together in all layouts."""
    parallel_layouts = layouts_of(name)
    check_layouts(name, [parallel_layouts[MODELS.index(name) % len(parallel_layouts)]], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_kinds_of_layers(kind: str, tmp_path: Path) -> None:
    """Sharding is arithmetic over the units that a family declares, so families with the same kind of layers are
    sharded alike."""
    check_layouts(LAYER_KINDS[kind], layouts_of(LAYER_KINDS[kind]), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_families_in_every_division(name: str, tmp_path: Path) -> None:
    check_layouts(name, layouts_of(name), tmp_path)


@each("name", ["glm4_moe_lite", "kimi_k2"])
def test_families_of_deepseeks_layers(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    EVERY[name](tmp_path / name)
    run = run_config(tmp_path / name)
    expected = whole_steps(run, PROMPTS)
    for tp in (2, 3):
        assert_same_bits(expected, divided_steps(run, tp, PROMPTS))


IN_STAGES = [name for name in MODELS if name != "chatglm_28layers"]


def check_stages(name: str, numbers: tuple[int, ...], folder: Path) -> None:
    """Compare two stages with this number of ranks."""
    (folder / name).mkdir()
    write_family(folder / name, name)
    prompts = prompts_for(name)
    run = of_dtype(run_config(folder / name, allow_pickle=True), "bfloat16")
    expected = whole_steps(run, prompts)
    for tp in numbers:
        assert_same_bits(expected, stage_steps(run, tp, 2, prompts))


@pytest.mark.long
@each("name", LAYER_KINDS.values())
def test_stages_of_kinds_of_layers(name: str, tmp_path: Path) -> None:
    check_stages(name, (1, 2), tmp_path)


@pytest.mark.long
@each("name", IN_STAGES)
def test_stages_of_families(name: str, tmp_path: Path) -> None:
    check_stages(name, (1 + IN_STAGES.index(name) % 2,), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("name", IN_STAGES)
def test_stages_of_families_with_one_rank_and_two(name: str, tmp_path: Path) -> None:
    check_stages(name, (1, 2), tmp_path)


@pytest.mark.long
@each("tp, pp, tied", [(3, 4, False), (2, 3, True)])
def test_many_stages(tp: int, pp: int, tied: bool, tmp_path: Path) -> None:
    write_llama(tmp_path / str(pp), num_hidden_layers=7, tie_word_embeddings=tied)
    run = run_config(tmp_path / str(pp))
    assert_same_bits(whole_steps(run, PROMPTS), stage_steps(run, tp, pp, PROMPTS))


def test_a_stage_has_its_layers_alone(tmp_path: Path) -> None:
    """The layers keep their names of the whole model. Of the modules outside the layers, a stage has those that it
    computes."""
    write_llama(tmp_path, num_hidden_layers=5)
    run, group = run_config(tmp_path), Threads.of(1)[0]
    files = [set(rank_plan(run, ParallelLayout(1, 3, 0, stage), group).files[0].shapes) for stage in range(3)]
    assert set.union(*files) == set(plan_of(run).files[0].shapes)
    assert sum(map(len, files)) == len(set.union(*files))
    assert "model.embed_tokens.weight" in files[0]
    assert {"model.norm.weight", "lm_head.weight"} <= files[2]
    layers = [sorted({int(name.split(".")[2]) for name in names if ".layers." in name}) for names in files]
    assert [*chain(*layers)] == [0, 1, 2, 3, 4]
    assert all(layers)


def test_a_tied_embedding_is_at_both_ends(tmp_path: Path) -> None:
    write_llama(tmp_path, num_hidden_layers=3, tie_word_embeddings=True)
    run, group = run_config(tmp_path), Threads.of(1)[0]
    files = [set(rank_plan(run, ParallelLayout(1, 3, 0, stage), group).files[0].shapes) for stage in range(3)]
    assert ["model.embed_tokens.weight" in names for names in files] == [True, False, True]


def test_adapters_of_stages(tmp_path: Path) -> None:
    """A stage loads the tensors of its layers, and refuses tensors that no stage has."""
    write_llama(tmp_path / "base", num_hidden_layers=4)
    write_adapter(tmp_path / "one", tmp_path / "base", LlamaForCausalLM, r=5, target_modules=ALL_LINEAR)
    run = run_config(tmp_path / "base")
    run = replace(run, model=replace(run.model, adapters={"one": str(tmp_path / "one")}))
    assert_same_bits(whole_steps(run, PROMPTS), stage_steps(run, 2, 2, PROMPTS))
    tensors = {
        f"base_model.model.model.layers.9.mlp.up_proj.lora_{factor}.weight": torch.zeros(5, 5) for factor in "AB"
    }
    change_adapter(tmp_path / "one", {}, dict(tensors))
    with pytest.raises(UserError, match=r"changes model\.layers\.9\.mlp\.up_proj, which this model does not have"):
        stage_steps(run, 1, 2, PROMPTS)


def test_a_layer_that_predicts_ahead_needs_one_stage(tmp_path: Path) -> None:
    NextTokenReference(tmp_path)
    run = run_config(tmp_path)
    source = resolve_model(run.model).with_mtp_layer()
    plan = plan_model(run.model, run.quant, source, prepare_device(run.device), packed=True)
    with pytest.raises(UserError, match="decode.speculate=mtp is not supported with pp=2: leave it out"):
        shard_plan(plan, ParallelLayout(1, 2), Threads.of(1)[0])


def test_ranks_divide_the_weights(tmp_path: Path) -> None:
    """Linear layers, the embedding and the head are sharded; norms are replicated."""
    write_llama(tmp_path, attention_bias=True)
    run = run_config(tmp_path)
    sizes = {name: parameter.numel() for name, parameter in plan_of(run).model.named_parameters()}
    ranks = [
        {name: parameter.numel() for name, parameter in rank_plan(run, ParallelLayout(3, 1, group.rank), group).model.named_parameters()}
        for group in Threads.of(3)
    ]  # fmt: skip
    shared = {name for name in sizes if "norm" not in name}
    keys = {name for name in shared if "k_proj" in name or "v_proj" in name}  # two heads for three ranks
    for name, count in sizes.items():
        rank_sizes = [rank[name] for rank in ranks]
        if name in keys:
            assert rank_sizes == [count // 2] * 3
        else:
            assert sum(rank_sizes) == count if name in shared else rank_sizes == [count] * 3, name


def test_pieces_are_joined_where_heads_and_channels_are_read(tmp_path: Path) -> None:
    write_llama(tmp_path)
    model = rank_plan(run_config(tmp_path), ParallelLayout(2), Threads.of(2)[0]).model
    joined = {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and layer.row_parallel
    }
    assert joined == {"o_proj", "down_proj"}


def test_one_rank_is_the_whole_model(tmp_path: Path) -> None:
    write_llama(tmp_path)
    run = run_config(tmp_path)
    plan = rank_plan(run, ParallelLayout(), Threads.of(1)[0])
    assert plan.model.embedding.words is None
    assert [type(file) for file in plan.files] == [type(file) for file in plan_of(run).files]


def test_models_that_cannot_be_sharded_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    run, group = run_config(tmp_path), Threads.of(1)[0]
    with pytest.raises(UserError, match="tp=5 is more than the 4 query heads of this model: give at most 4"):
        rank_plan(run, ParallelLayout(5), group)
    with pytest.raises(UserError, match="pp=3 is more than the model's 2 layers: give at most 2"):
        rank_plan(run, ParallelLayout(1, 3), group)
    with pytest.raises(
        UserError, match="model.weights=random makes other weights in parts than whole: give a checkpoint"
    ):
        rank_plan(replace(run, model=ModelConfig(str(tmp_path), weights=Weights.random)), ParallelLayout(2), group)

"""A sharded model exported: the ranks' parts run without the checkpoint and without the families, and have the bits of
one process."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import ModelConfig, ParallelConfig, RunConfig, Sum, Task
from conf.tasks import ConvertConfig, ExportConfig
from kernels import build
from kernels.collectives import nodes
from models.exported.describe import describe_layout
from models.exported.description import EXPORT
from models.exported.trace import Traced, trace
from models.formats.manifest import verify_manifest
from models.sharding import ParallelLayout
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from pipelines.loading.shard_plan import shard_plan
from pipelines.tasks import export_files, export_parts
from pipelines.tasks.convert import run_convert
from tests.helpers.adapters import outputs, write_adapter
from tests.helpers.builders import complete, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import write_other
from tests.helpers.divided import assert_same_bits, plan_of, stage_steps, whole_steps
from tests.helpers.divided_engines import close, parallel
from tests.helpers.exports import (
    A8W8,
    AUTO,
    DECODE,
    FAMILIES,
    PROMPTS,
    Exports,
    answers,
    exported,
    family_model,
    llama,
    on_export,
    prompts_for,
    without_families,
)
from tests.helpers.family import FULL, SLIDING
from tests.helpers.rank_threads import run_ranks
from tests.helpers.soft_prefixes import write_paddle, write_peft

pytestmark = pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")

# Layers with their own way of sharding, besides the checkpoint's, and positions given by marks in the prompt; with the
# number of stages. deepseek_v3 has stages of unlike layers, and each stage of chatglm needs the positions. The second
# stage of lfm2 has no attention layer, and the second stage of gemma3 no window.
CHOSEN = {"phi3": 1, "falcon_one_key": 1, "bloom": 1, "qwen2_moe": 1}
CHOSEN |= dict.fromkeys(("deepseek_v3", "chatglm", "lfm2", "gemma3"), 2)
INT4_FP8_CACHE = QuantConfig(QuantScheme.int4, group_size=32, kv_cache=KVCacheFormat.fp8)
SCHEMES = [
    (A8W8, 2),
    (INT4_FP8_CACHE, 3),
    (QuantConfig(QuantScheme.fp8, activations=Activations.dynamic, kv_cache=KVCacheFormat.int4), 2),
]


def layer(folder: Path, quant: QuantConfig) -> RunConfig:
    """Write a model of one layer, and return a run of it."""
    return llama(folder, quant, num_hidden_layers=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_llama(folder, num_hidden_layers=3, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def folder(checkpoint: Path, exports: Exports) -> Path:
    return exports.of(run_config(checkpoint), tp=2, pp=2)


@pytest.mark.long
def test_processes_give_what_one_gives(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with and without an adapter."""
    layers = ["q_proj", "down_proj"]
    adapter = write_adapter(tmp_path / "adapter", checkpoint, LlamaForCausalLM, 3, r=5, target_modules=layers)
    run = run_config(checkpoint, adapters={"a": str(adapter)})

    def results_of(engine: Engine) -> list[Any]:
        adapted = outputs(engine, [(prompt, "a") for prompt in PROMPTS], DECODE)
        return [answers(engine), [output.completions for output in adapted]]

    expected = results_of(load_engine(run, 3))
    without_families(monkeypatch)
    divided = load_engine(parallel(on_export(run, folder), 2, 2), 3)
    actual = results_of(divided)
    close(divided)
    assert actual == expected


@pytest.mark.long
def test_ranks_have_blocks_for_windows(exports: Exports, tmp_path: Path) -> None:
    """The first stage has no window, but it manages the blocks of the second."""
    write_other(tmp_path, "cwm", layer_types=[FULL, SLIDING], num_hidden_layers=2, max_position_embeddings=1024)
    run, prompts = run_config(tmp_path), [[*range(3, 90)] * 3, [5] * 70, [9]]
    engines = load_engine(run, 3), load_engine(parallel(on_export(run, exports.of(run, pp=2)), 1, 2), 3)
    expected, actual = (answers(engine, prompts) for engine in engines)
    num_blocks, num_divided_blocks = (engine.executor.cache.num_window_blocks for engine in engines)
    close(engines[1])
    assert actual == expected
    assert num_blocks == num_divided_blocks > 0


@pytest.mark.long
def test_prefixes_of_ranks_without_stages(exports: Exports, tmp_path: Path) -> None:
    """Keys and values, and embeddings that replace the embeddings of the ranks' tokens."""
    model = layer(tmp_path / "model", A8W8)
    write_paddle(tmp_path / "keys.npy", 5, num_layers=1)
    write_peft(tmp_path / "embedded", LlamaForCausalLM.from_pretrained(tmp_path / "model"), "prompt_tuning", 3)
    prefixes = {name: str(tmp_path / name) for name in ("keys.npy", "embedded")}
    run = replace(model, model=replace(model.model, prefixes=prefixes))
    divided = load_engine(parallel(on_export(run, exports.of(model, tp=2)), 2), 3)
    expected, actual = (
        [complete(engine, PROMPTS, DECODE, name) for name in prefixes] for engine in (load_engine(run, 3), divided)
    )
    close(divided)
    assert actual == expected


@pytest.mark.long
@each("family, pp", [*CHOSEN.items()])
def test_families(family: str, pp: int, exports: Exports, tmp_path: Path) -> None:
    check(family_model(family, tmp_path / family), exports, 2, pp, prompts_for(family))


@pytest.mark.matrix
@each("family", [family for family in FAMILIES if CHOSEN.get(family) != 2])
def test_the_other_families(family: str, exports: Exports, tmp_path: Path) -> None:
    check(family_model(family, tmp_path / family), exports, 2, 2, prompts_for(family))


@pytest.mark.long
@each("quant, tp", SCHEMES)
def test_schemes(quant: QuantConfig, tp: int, exports: Exports, tmp_path: Path) -> None:
    check(layer(tmp_path / "model", quant), exports, tp, 1)


@pytest.mark.matrix
@each("quant, tp", [(quant, 5 - tp) for quant, tp in SCHEMES])
def test_schemes_by_the_other_number_of_ranks(quant: QuantConfig, tp: int, exports: Exports, tmp_path: Path) -> None:
    check(layer(tmp_path / "model", quant), exports, tp, 1)


def check(run: RunConfig, exports: Exports, tp: int, pp: int, prompts: list[list[int]] = PROMPTS) -> None:
    """Compare steps of ranks that are threads with one process's."""
    export_run = parallel(on_export(run, exports.of(run, tp=tp, pp=pp)), tp, pp)
    assert_same_bits(whole_steps(run, prompts), stage_steps(export_run, tp, pp, prompts))


@pytest.mark.long
def test_activations_are_quantised_where_a_run_asks_for_it(exports: Exports, tmp_path: Path) -> None:
    run = layer(tmp_path / "model", INT4_FP8_CACHE)
    export_run = parallel(on_export(run, exports.of(run, tp=3)), 3)
    expected = whole_steps(replace(run, quant=replace(run.quant, activations=Activations.auto)), PROMPTS)
    assert_same_bits(expected, stage_steps(replace(export_run, quant=AUTO), 3, 1, PROMPTS))


@pytest.mark.long
def test_the_folder_has_one_part_per_rank(folder: Path) -> None:
    content = json.loads((folder / EXPORT).read_text())
    assert content == describe_layout(folder, 2, 2)
    assert [*content["sha256"]] == [f"rank_{rank}/{EXPORT}" for rank in range(4)]
    verify_manifest(folder)
    sizes = [(folder / f"rank_{rank}" / "weights.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes) < 0.6 * sum(sizes)


@pytest.mark.long
@each(
    "parallel_layout, line",
    [
        (ParallelConfig(), "parallel=single does not run .*, which was exported for tp=2 and pp=2: "
                           "give parallel=tp_pp parallel.tp=2 parallel.pp=2$"),
        (replace(parallel(RunConfig(), 2, 2).parallel, sum=Sum.reduce), "parallel.sum=reduce contradicts .*: leave it out$"),
        (parallel(RunConfig(), 2).parallel, "tp=2 and pp=1 do not run .*, which was exported for tp=2 and pp=2: give"),
    ],
)  # fmt: skip
def test_another_division(parallel_layout: ParallelConfig, line: str, folder: Path) -> None:
    with pytest.raises(UserError, match=line):
        load_engine(replace(run_config(folder), parallel=parallel_layout), 1)


@pytest.mark.long
def test_tasks_and_sizes_that_do_not_fit_a_sharded_export_are_refused(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is exported already: give the model that it was made of"):
        exported(run_config(folder), tmp_path / "again")
    run = RunConfig(
        model=ModelConfig(path=str(folder)), task=Task.convert, convert=ConvertConfig(str(tmp_path / "again"))
    )
    with pytest.raises(UserError, match="is exported already: give the model that it was made of"):
        run_convert(run, tmp_path / "run", lambda run, output_dir: "")
    with pytest.raises(UserError, match="pp=4 is more than the model's 3 layers: give at most 3"):
        exported(run_config(checkpoint), tmp_path / "again", pp=4)
    with pytest.raises(UserError, match="export.tp=0 is not allowed: give a number from 1 to 512"):
        ExportConfig("folder", tp=0)
    assert not (tmp_path / "again").exists()


@pytest.mark.long
def test_one_other_bit_of_a_rank_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Traced]()

    def one_bit_off(*arguments: Any) -> Traced:
        made.append(traced := trace(*arguments))
        if len(made) < 3:  # of the first rank
            return traced
        name = next(name for name in traced.weights if name.endswith("norm.weight"))
        other = traced.weights[name].clone()
        other[5] = torch.nextafter(other[5], torch.tensor(torch.inf))
        return replace(traced, weights=traced.weights | {name: other})

    write_llama(tmp_path / "model", num_hidden_layers=1)
    monkeypatch.setattr(export_files, "trace", one_bit_off)
    with pytest.raises(UserError, match=r"does not take this model \(its graph differs from it in result 0 of \d+\)"):
        exported(run_config(tmp_path / "model"), tmp_path / "made", tp=2)
    assert [*tmp_path.iterdir()] == [tmp_path / "model"]


def test_ranks_that_give_other_bits_than_one_process(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another_norm(plan: Any, *arguments: Any) -> Any:
        rank_plan = shard_plan(plan, *arguments)
        for norm in [layer for layer in rank_plan.model.modules() if hasattr(layer, "eps")]:
            norm.eps = 0.1
        return rank_plan

    monkeypatch.setattr(export_parts, "shard_plan", with_another_norm)
    with pytest.raises(
        UserError, match=r"with tp=2 and pp=1 \(result 0 of 20 differs from one process's result\): run it as"
    ):
        exported(run_config(checkpoint), tmp_path / "made", tp=2)
    assert [*tmp_path.iterdir()] == []


def change_part(folder: Path, change: Callable[[dict[str, Any]], None], rank: int = 1) -> None:
    """Change a rank's export.json, and write its sha256 into the folder's export.json."""
    file = folder / f"rank_{rank}" / EXPORT
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    (folder / EXPORT).write_text(json.dumps(describe_layout(folder, 2, 2)))


@pytest.mark.long
@each(
    "change, line",
    [
        (lambda content: content["part"]["division"].update(tp_rank=0), "it is for ParallelLayout"),
        (lambda content: content["part"]["division"].update(tp_rank=-1), "not an integer from 0"),
        (lambda content: content["part"]["division"].update(tp_rank=2), "its part belongs to no rank"),
        (lambda content: content["part"].update(own_layers=[0, 9]), "its part belongs to no rank"),
        (lambda content: content["part"].update(keys=[[0, 2]]), "its part lacks the keys of a layer"),
        (lambda content: content["part"].update(width="64"), "not an integer from 0"),
        (lambda content: content["part"]["outputs"].update({"model.layers.0.mlp.up_proj": [[0, 2**20]]}),
         "outputs that are not in model.layers.0.mlp.up_proj"),
        (lambda content: content["part"]["outputs"].update(other=[[0, 1]]), "is damaged"),
        (lambda content: content["part"].update(absent=[3]), "or the name of an absent module"),
        (lambda content: content["part"].pop("absent"), "'absent'"),
        (lambda content: content.update(windows=[8, None, None]), "rank 1 has other windows than rank 0"),
        (lambda content: content.pop("part"), "it lacks keys or values of a layer"),
    ],
)  # fmt: skip
def test_a_damaged_part_is_one_line(
    change: Callable[[dict[str, Any]], None], line: str, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True))
    change_part(copy, change)
    check_part(copy, line)


def check_part(folder: Path, line: str) -> None:
    plan = plan_of(parallel(run_config(folder), 2, 2))
    with pytest.raises(UserError, match=line) as error:
        shard_plan(plan, ParallelLayout(2, 2, 1, 0), None)  # type: ignore[arg-type]
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_a_part_of_another_export_is_one_line(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    shutil.copyfile(copy / "rank_0" / EXPORT, copy / "rank_1" / EXPORT)
    check_part(copy, f"rank_1/{EXPORT} is damaged .its sha256 is not the one in {EXPORT}.: export the model again")
    (copy / "rank_1" / EXPORT).unlink()
    check_part(copy, f"rank_1/{EXPORT} is damaged .No such file or directory.: export the model again")


def test_nodes_of_another_form_are_refused() -> None:
    """A graph is untrusted: sizes below 0 would become addresses."""

    def work(group: Any) -> None:
        functions, x = nodes.node_functions(group), torch.zeros(3, 2)
        for name, arguments in (
            ("gather", (x, [2, -2])),
            ("gather", (x, [])),
            ("gather", (x, [2, 2, 2])),
            ("gather_first", (x, [2, -2], group.rank)),
            ("gather_first", (x, [2, 2], 1 - group.rank)),
            ("owned_rows", (x, torch.zeros(4, dtype=torch.int64))),
            ("owned_rows", (x, torch.zeros(3))),
        ):
            with pytest.raises(ValueError, match=r"widths|node of rank|owners"):
                functions[name](*arguments)

    run_ranks(2, work)


def test_the_fakes_have_the_shapes_of_the_collectives() -> None:
    def work(group: Any) -> None:
        x, owners = torch.full((3, 2 + group.rank), float(group.rank)), torch.tensor([0, 1, 1])
        rows = torch.full((3, 4), float(group.rank))
        results: dict[str, Tensor] = {}
        functions = nodes.node_functions(group)
        for name, arguments in {
            "gather": (x, [2, 3]),
            "gather_first": (x, [2, 3], group.rank),
            "owned_rows": (rows, owners),
        }.items():
            results[name] = functions[name](*arguments)
            meta = [argument.to("meta") if isinstance(argument, Tensor) else argument for argument in arguments]
            assert getattr(torch.ops.quintet, name)(*meta).shape == results[name].shape
        assert results["owned_rows"][:, 0].tolist() == [0, 1, 1]
        assert results["gather"].equal(torch.cat((torch.zeros(3, 2), torch.ones(3, 3)), dim=1))

    run_ranks(2, work)

"""An exported model compared with its source: the same bits without its code and its checkpoint; invalid files are one
line."""

import json
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DType, ModelConfig, ParallelConfig, ParallelMode, RunConfig, Task, Weights
from conf.tasks import ConvertConfig, PredictConfig
from models.batch import KVCache
from models.exported import description, functions
from models.exported.description import EXPORT, GRAPH, WEIGHTS, read_description
from models.exported.graph import INPUTS
from models.exported.model import GraphEmbedding
from models.exported.reader import DTYPES, build_graph, read_graph
from models.exported.trace import FieldsBatch, Traced, trace
from models.formats.manifest import verify_manifest
from models.layers.norm import AddRMSNorm
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.loading.exported_plan import check_mode
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.parallel_planner import plan_layouts
from pipelines.loading.planning import plan_model
from pipelines.tasks import export_files, export_steps
from pipelines.tasks.convert import run_convert
from tests.helpers.builders import REPOSITORY, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.exports import (
    A8W8,
    AUTO,
    FAMILIES,
    FLOATS,
    FP8_CACHE,
    INT4,
    INT8,
    INT8_INT4_CACHE,
    PROMPTS,
    Exports,
    answers,
    exported,
    family_model,
    llama,
    on_export,
    prompts_for,
    wide_llama,
    without_families,
)
from tests.helpers.gguf_files import write_random_llama, write_twin
from tests.helpers.quantized_models import CALIBRATED, STATIC_CACHES, make, quantize_run, random_rows, write_rows
from tests.helpers.tiers import tiers

# Together with deepseek_v3 in test_export_divided.py they have all operators, with all forms of arguments in graphs.
CHOSEN = [
    "baichuan-13b",
    "baichuan2-13b",
    "bloom",
    "chatglm",
    "chatglm3",
    "cohere2",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma2",
    "gemma3",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "lfm2",
    "lfm2_moe",
    "llama3",
    "llama_tied_bias",
    "ministral3",
    "opt",
    "phi3",
    "qwen",
    "qwen2",
    "qwen2_moe",
    "qwen3",
]


def check_alone(source: RunConfig, exports: Exports, more_bytes: int = 0, prompts: list[list[int]] = PROMPTS) -> None:
    """Compute with the model, and again with its export without the families.

    `more_bytes`: further memory of the export's weights.
    """
    run = run_config(exports.of(source))
    run = replace(run, model=replace(run.model, dtype=DType.auto))
    chunks = replace(run, device=replace(run.device, max_batched_tokens=8))
    model = load_engine(source, 3)
    expected = answers(model, prompts)
    with pytest.MonkeyPatch.context() as patch:
        without_families(patch)
        engine = load_engine(run, 3)
        assert answers(engine, prompts) == expected
        assert engine.executor.weight_bytes == model.executor.weight_bytes + more_bytes
        if not engine.capabilities.needs_whole_prompt:
            assert answers(load_engine(chunks, 3)) == expected


@pytest.mark.long
def test_a_model_runs_without_its_code(exports: Exports, tmp_path: Path) -> None:
    check_alone(llama(tmp_path), exports)


@pytest.mark.long
@each("family", CHOSEN)
def test_families_run_without_their_code(family: str, exports: Exports, tmp_path: Path) -> None:
    check_alone(family_model(family, tmp_path / family), exports, prompts=prompts_for(family))


@pytest.mark.matrix
@each("family", [family for family in FAMILIES if family not in CHOSEN])
def test_the_other_families_run_without_their_code(family: str, exports: Exports, tmp_path: Path) -> None:
    check_alone(family_model(family, tmp_path / family), exports, prompts=prompts_for(family))


@pytest.mark.long
def test_a_prompt_without_the_marks_that_its_model_looks_for(exports: Exports, tmp_path: Path) -> None:
    engine = load_engine(run_config(exports.of(family_model("chatglm", tmp_path / "model"))), 1)
    line = "the prompt lacks tokens that mark its parts: give a prompt with the ids 284, and 281 or 280$"
    with pytest.raises(UserError, match=line):
        engine.request(0, [3, 281], DecodeConfig())


@pytest.mark.long
@each(
    "family, quant",
    [("llama3", INT8), ("gpt2", INT8), ("qwen2_moe", replace(INT8, skip=["*down_proj"])), ("llama", INT4)],
)
def test_activations_are_quantised_where_a_run_asks_for_it(
    family: str, quant: QuantConfig, exports: Exports, tmp_path: Path
) -> None:
    """As in the model: before products of many rows, by each weight of many experts, and never in the same run's short
    steps."""
    run = llama(tmp_path / family, quant) if family == "llama" else family_model(family, tmp_path / family, quant)
    export_run, prompts = on_export(run, exports.of(run)), [[*range(5, 69)], [*range(70, 79)], [9]]
    auto = replace(quant, activations=Activations.auto)
    expected = answers(load_engine(replace(run, quant=auto), 3), prompts)
    for quant_config in (AUTO, auto):
        assert answers(load_engine(replace(export_run, quant=quant_config), 3), prompts) == expected
    assert answers(load_engine(export_run, 3), prompts) != expected
    with pytest.raises(UserError, match="quant contradicts .*, which was exported with its own: leave quant out"):
        load_engine(replace(export_run, quant=replace(auto, kv_cache=KVCacheFormat.int8)), 1)


@pytest.mark.long
def test_activations_of_floats_and_of_codes_stay_as_they_are(exports: Exports, tmp_path: Path) -> None:
    for quant in (FLOATS, A8W8):
        export_run = run_config(exports.of(llama(tmp_path / "model", quant)))
        with pytest.raises(
            UserError, match="quant.activations=auto is for int8 and int4 weights .* this model has none"
        ):
            load_engine(replace(export_run, quant=AUTO), 1)


def test_no_activations_of_each_run_are_exported(tmp_path: Path) -> None:
    auto = replace(INT8, activations=Activations.auto)
    with pytest.raises(
        UserError, match="quant.activations=auto is a choice of each run: leave it out, and give it where"
    ):
        exported(llama(tmp_path / "model", auto), tmp_path / "made")


@pytest.mark.long
@each("quant", [FP8_CACHE, A8W8, INT8_INT4_CACHE, INT4, QuantConfig(QuantScheme.fp8, activations=Activations.dynamic)])
def test_schemes_and_caches(quant: QuantConfig, exports: Exports, tmp_path: Path) -> None:
    check_alone(llama(tmp_path / "model", quant), exports)


@pytest.mark.long
@each(
    "dtype, quant",
    [
        (DType.bfloat16, FLOATS),
        (DType.float16, FLOATS),
        (DType.bfloat16, replace(A8W8, kv_cache=KVCacheFormat.none)),
        (DType.float16, A8W8),
    ],
)
def test_numbers_of_16_bits(dtype: DType, quant: QuantConfig, exports: Exports, tmp_path: Path) -> None:
    """Also weights that are large enough for 12 bits."""
    check_alone(wide_llama(tmp_path / "model", dtype, quant), exports)


@pytest.mark.long
def test_blocks_of_a_gguf_file(exports: Exports, tmp_path: Path) -> None:
    write_llama(tmp_path / "model", hidden_size=64, intermediate_size=96)
    check_alone(run_config(write_twin(tmp_path / "model", tmp_path / "twin.gguf", "Q5_0")), exports)


@pytest.mark.parametrize("kind", tiers([("Q4_K",), ("Q5_K",), ("Q6_K",), ("NVFP4",)], long=[("Q4_K",)]))
def test_superblocks_of_a_gguf_file(kind: str, exports: Exports, tmp_path: Path) -> None:
    write_llama(tmp_path / "model", hidden_size=256, intermediate_size=256)
    write_random_llama(tmp_path / "random.gguf", tmp_path / "model", kind)
    check_alone(run_config(tmp_path / "random.gguf"), exports)


@pytest.mark.long
@each("name, cache", [("a8w8 static", "int8, static"), ("fp8 static per tensor", "fp8, static"), ("int4 awq", None)])
def test_calibrated_models(name: str, cache: str | None, exports: Exports, tmp_path: Path) -> None:
    """Scales of activations and of the cache, asymmetric codes."""
    base, rows = tmp_path / "base", write_rows(tmp_path / "rows.jsonl", random_rows(20, 16))
    write_llama(base, intermediate_size=96)
    quant = replace(CALIBRATED[name], **STATIC_CACHES[cache] if cache else {})
    make(quantize_run(base, quant, tmp_path / name, rows), tmp_path / f"{name}, run")
    # two layers' keys and values of two heads in float32: flat, in addition to those of the checkpoint's shape
    check_alone(run_config(tmp_path / name), exports, more_bytes=2 * 2 * 2 * 4 if cache else 0)


@pytest.fixture(scope="module")
def export_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.of(llama(tmp_path_factory.mktemp("model")))


def step_of(folder: Path) -> tuple[dict[str, Tensor], KVCache]:
    (batch, *_) = export_steps._batches(load_engine(run_config(folder), 1).executor.model.config.vocab_size)
    description = read_description(folder)
    formats = [(keys.format, values.format) for keys, values in description.empty_cache({}).attention_layers]
    cache = allocate_kv_cache(description.layer_caches, 8, 16, formats, description.dtype, torch.device("cpu"))
    for part in cache.tensors:
        part.zero_()
    return {name: getattr(batch, name) for name in INPUTS}, cache


def test_torch_loads_the_same_archive(export_folder: Path) -> None:
    fields, cache = step_of(export_folder)
    description = read_description(export_folder)
    weights = load_file(export_folder / WEIGHTS)
    program = torch.export.load(export_folder / GRAPH)
    assert not program.state_dict
    assert not program.constants
    stored = [part.clone() for part in cache.tensors]
    hidden, logits = program.module()(fields, stored, {name: weights[name] for name in description.weights}, [])
    own_weights = {name: weights[name] for name in description.weights}
    graph = build_graph(
        read_graph(export_folder / GRAPH, description.sha256[GRAPH]),
        INPUTS,
        description.empty_cache(weights),
        description.local_windows,
        own_weights,
        GraphEmbedding(description.embedding_dim),
    )
    actual = graph.compute_hidden(FieldsBatch(fields), cache)
    assert actual.equal(hidden)
    assert graph.compute_logits(actual).equal(logits)
    assert all(mine.equal(other) for mine, other in zip(cache.tensors, stored, strict=True))


def test_the_weights_are_mapped(export_folder: Path) -> None:
    engine = load_engine(run_config(export_folder), 1)
    assert engine.executor.weight_bytes > 0
    assert str(export_folder / WEIGHTS) in Path("/proc/self/maps").read_text()


@pytest.mark.long
def test_killed_at_its_last_step_it_leaves_no_folder(tmp_path: Path) -> None:
    """Everything is written and verified before. The next export removes the hidden remains."""
    write_llama(tmp_path / "model", num_hidden_layers=1)
    driver = (
        "import sys; from pathlib import Path; from pipelines.tasks import export; from tests.helpers.builders import run_config; "
        "from tests.helpers.kill import before; from tests.helpers.exports import exported; "
        "before(export, 'write_manifest', 1); exported(run_config(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", driver, str(tmp_path / "model"), str(tmp_path / "made")]
    killed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "made").exists()
    assert (tmp_path / ".made.partial" / GRAPH).is_file()
    verify_manifest(exported(run_config(tmp_path / "model"), tmp_path / "made"))
    assert not (tmp_path / ".made.partial").exists()


def test_the_dtypes_match_torchs_schema() -> None:
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    assert {number: _SERIALIZE_TO_TORCH_DTYPE[number] for number in DTYPES} == DTYPES


def test_nothing_in_the_archive_is_pickled(export_folder: Path) -> None:
    with zipfile.ZipFile(export_folder / GRAPH) as archive:
        contents = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert contents["data/sample_inputs/model.pt"] == b""
    assert not any(name.startswith("data/weights/weight") or name.startswith("data/constants/t") for name in contents)
    assert str(Path(__file__).parents[3]).encode() not in contents["models/model.json"]


@pytest.mark.long
def test_one_other_bit_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_bit_off(*arguments: Any) -> Traced:
        traced = trace(*arguments)
        name = next(name for name in traced.weights if name.endswith("norm.weight"))
        other = traced.weights[name].clone()
        other[5] = torch.nextafter(other[5], torch.tensor(torch.inf))
        return replace(traced, weights=traced.weights | {name: other})

    write_llama(tmp_path / "model", num_hidden_layers=1)
    monkeypatch.setattr(export_files, "trace", one_bit_off)
    with pytest.raises(
        UserError, match=r"does not take this model \(its graph differs from it in result 0 of \d+\): run it as it is"
    ):
        exported(run_config(tmp_path / "model"), tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / ".made.partial").exists()


@pytest.mark.long
def test_a_model_that_cannot_be_a_graph_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_values(norm: AddRMSNorm, x: Tensor, update: Tensor | None, readers: Any = ()) -> tuple[Tensor, Tensor]:
        return (x * norm.weight if x.sum() > 0 else x), x

    write_llama(tmp_path / "model", num_hidden_layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(AddRMSNorm, "forward", of_values)
        with pytest.raises(UserError, match=r"^task=export does not take this model \(.*\): run it as it is$"):
            exported(run_config(tmp_path / "model"), tmp_path / "made")
    monkeypatch.setattr(functions, "ATEN", frozenset())
    with pytest.raises(
        UserError, match=r"not take this model \('torch.ops.aten.* is not a function of a model\): run it as it is$"
    ):
        exported(run_config(tmp_path / "model"), tmp_path / "made")
    assert [*tmp_path.iterdir()] == [tmp_path / "model"]


@each(
    "change, line",
    [
        (lambda run: replace(run, model=replace(run.model, dtype=DType.bfloat16)),
         "model.dtype=bfloat16 contradicts .*, which was exported in float32"),
        (lambda run: replace(run, quant=A8W8), "quant contradicts .*, which was exported with its own: leave quant out"),
        (lambda run: replace(run, model=replace(run.model, weights=Weights.random)),
         "model.weights=random is not used by an exported model"),
        (lambda run: replace(run, model=replace(run.model, keep_packed=True)),
         "model.keep_packed=true is not used by an exported model"),
    ],
)  # fmt: skip
def test_settings_that_contradict_it(export_folder: Path, change: Callable[[RunConfig], RunConfig], line: str) -> None:
    with pytest.raises(UserError, match=line):
        load_engine(change(run_config(export_folder)), 1)


def test_ranks_and_a_gpu_do_not_run_it(export_folder: Path) -> None:
    run = run_config(export_folder)
    source = resolve_model(run.model)
    with pytest.raises(UserError, match="parallel=tp does not run .*, whose graph is of one process: leave it out"):
        check_mode(source, ParallelMode.tp)
    with pytest.raises(
        UserError, match="parallel=auto does not plan for .*, which is exported: give the model that it was"
    ):
        plan_layouts(run.model, run.quant, ParallelConfig(ParallelMode.auto), run.device, 1)
    with pytest.raises(UserError, match="device=cuda does not run .*, which is packed for a CPU: give device=cpu"):
        plan_model(run.model, run.quant, source, torch.device("cuda"), packed=True)


def test_exported_models_and_packed_files_are_not_exported(tmp_path: Path, export_folder: Path) -> None:
    with pytest.raises(UserError, match="is exported already: give the model that it was made of"):
        exported(run_config(export_folder), tmp_path / "again")
    run = run_config(export_folder)
    run = replace(run, task=Task.convert, predict=PredictConfig(), model=ModelConfig(path=str(export_folder)))
    convert = replace(run, convert=ConvertConfig(str(tmp_path / "again")))
    with pytest.raises(UserError, match="is exported already: give the model that it was made of"):
        run_convert(convert, tmp_path / "run", lambda run, output_dir: "")
    run = run_config(export_folder)
    with pytest.raises(UserError, match="model.keep_packed=true is not used by task=export: leave it out"):
        exported(replace(run, model=replace(run.model, keep_packed=True)), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_other_instructions_and_operators(tmp_path: Path, export_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "instruction_set", lambda: "sve")
    with pytest.raises(UserError, match="was exported for .*, and this machine has sve: export the model again"):
        load_engine(run_config(export_folder), 1)
    monkeypatch.undo()
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy"))
    content = json.loads((folder / EXPORT).read_text())
    content["operators"]["rms_norm"] = "quintet::rms_norm(Tensor x) -> Tensor"
    (folder / EXPORT).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"was exported with other operators \(rms_norm\): export the model again"):
        load_engine(run_config(folder), 1)

"""`task=convert`: bit-identical tensors on any path, read by the formats' libraries; no partial output, no changed
input."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.errors import UserError
from conf.tasks import ConvertDType
from models.formats import open_checkpoint
from models.formats.manifest import verify_manifest
from pipelines.loading.load_engine import load_engine
from tests.helpers.builders import SHARED, all_logits, engine_of, run_config, weights_of, write_llama
from tests.helpers.cases import each
from tests.helpers.catalog import GOLDEN_FAMILIES, GOLDENS, TOLERANCE, link
from tests.helpers.command import run
from tests.helpers.conversion import SHARDED, contents, convert, environment, names, tensors_in
from tests.helpers.fork_server import true_starts
from tests.helpers.huggingface_files import START, assert_same, make_tensors, write_shards, write_whole
from tests.helpers.meta_files import tensors_of, write_meta

# Of each kind of layers and of files.
CHOSEN = ("baichuan2-13b", "bloom", "chatglm_bin", "gemma2", "gpt2", "llama3", "llama_tied_bias", "qwen2_moe")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("source"), make_tensors())


def test_round_trip_over_three_divisions(chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chatty = shutil.copytree(chatty, tmp_path / "source")
    (chatty / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7}')
    (chatty / "notes.txt").write_text("neither weights nor tokenizer")
    before = contents(chatty)
    first = convert(chatty, tmp_path / "4x2", format=SHARDED, tp=4, pp=2)
    second = convert(first, tmp_path / "2x1", {"verify": True}, format=SHARDED, tp=2)
    last = convert(second, tmp_path / "hf", {"verify": True})
    assert_same(tensors_in(last), tensors_in(chatty))
    assert contents(chatty) == before
    ranks = {f"rank_{stage}_{rank}.safetensors" for stage in range(2) for rank in range(4)}
    beside = {"config.json", "generation_config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json"}
    assert names(first) == ranks | beside | {"layout.json"}
    assert names(last) == beside | {"model.safetensors"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert contents(last)[name] == before[name]
    for name in ("config.json", "generation_config.json"):
        assert json.loads(contents(last)[name]) == json.loads(before[name])
    assert names(tmp_path) == {"source", "4x2", "2x1", "hf", "4x2-run", "2x1-run", "hf-run"}  # no hidden file is left
    assert names(tmp_path / "hf-run") == {"metrics.json", "environment.json", "config.yaml"}
    metrics = json.loads(contents(tmp_path / "4x2-run")["metrics.json"])
    tensors = tensors_in(chatty)
    assert metrics["num_tensors"] == len(tensors)
    assert metrics["bytes_read"] == sum(tensor.nbytes for tensor in tensors.values())
    assert metrics["bytes_written"] == sum(file.stat().st_size for file in first.iterdir())
    assert metrics["num_files"] == len(names(first))
    assert min(metrics["convert_s"], metrics["peak_memory_bytes"]) > 0
    assert str(last) in capsys.readouterr().out


def test_any_division_becomes_any_other(tmp_path: Path) -> None:
    """A model with 4 query heads and 2 key heads, which 3 does not divide, and stages with other tensors than
    before."""
    write_llama(tmp_path / "whole", num_hidden_layers=3, intermediate_size=96)
    halves = convert(tmp_path / "whole", tmp_path / "2", format=SHARDED, tp=2)
    thirds = convert(halves, tmp_path / "3x2", format=SHARDED, tp=3, pp=2)
    last = convert(thirds, tmp_path / "last")
    assert_same(tensors_in(last), tensors_in(tmp_path / "whole"))
    entries = json.loads((thirds / "layout.json").read_text())["tensors"]
    names_of = ("mlp.gate_proj", "self_attn.q_proj", "self_attn.k_proj")
    gate, query, key = (entries[f"model.layers.1.{name}.weight"] for name in names_of)
    assert (gate["axis"], [piece["ranges"] for piece in gate["pieces"]]) == (0, [[[0, 32]], [[32, 64]], [[64, 96]]])
    heads = [[piece["ranges"][0][1] - piece["ranges"][0][0] for piece in entry["pieces"]] for entry in (query, key)]
    assert heads == [[16, 16, 32], [16, 16]]  # two ranks share the first key head
    assert [len(piece["files"]) for piece in key["pieces"]] == [2, 1]
    assert [len(piece["files"]) for piece in entries["model.layers.0.input_layernorm.weight"]["pieces"]] == [3]


@pytest.mark.long
@each("family", CHOSEN)
def test_families_go_and_come_back(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


@pytest.mark.matrix
@each("family", [family for family in GOLDEN_FAMILIES if family not in CHOSEN])
def test_the_other_families_go_and_come_back(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


def check_family(family: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    folder = link(family, tmp_path / "source")
    sharded = convert(folder, tmp_path / "sharded", {"allow_pickle": True}, format=SHARDED, tp=2, pp=2)
    golden = load_file(GOLDENS / family / "golden.safetensors")
    prompt = golden["input_ids"][0].tolist()
    torch.testing.assert_close(all_logits(engine_of(sharded), prompt), golden["logits"][0], atol=TOLERANCE, rtol=0)
    layout = json.loads((sharded / "layout.json").read_text())
    divided = [entry for entry in layout["tensors"].values() if len(entry["pieces"]) == 2]
    assert len(divided) > len(layout["tensors"]) / 4
    assert_same(tensors_in(convert(sharded, tmp_path / "hf")), tensors_in(folder))


def test_the_sharded_folder_loads_to_the_same_parameters(chatty: Path, tmp_path: Path) -> None:
    sharded = convert(chatty, tmp_path / "sharded", format=SHARDED, tp=2, pp=2)
    engines = [load_engine(run_config(folder, verify=folder == sharded), 3) for folder in (chatty, sharded)]
    expected, actual = (weights_of(engine.executor.model) for engine in engines)
    assert_same(actual, expected)


def test_transformers_loads_what_a_meta_source_became(tmp_path: Path) -> None:
    expected = tensors_of(tmp_path / "twin")
    meta = write_meta(tmp_path / "meta", expected, num_shards=2)
    folder = convert(meta, tmp_path / "hf", {"allow_pickle": True})
    assert_same(tensors_in(folder), expected)
    prompt = torch.tensor([list(range(3, 43))])
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "twin")]
    with torch.no_grad():
        actual, wanted = (model(prompt).logits for model in models)
    assert actual.dtype == wanted.dtype == torch.float32
    assert torch.equal(actual, wanted)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert None not in config.values()
    through = convert(meta, tmp_path / "sharded", {"allow_pickle": True}, format=SHARDED, tp=2)
    assert_same(tensors_in(convert(through, tmp_path / "back")), expected)


def test_transformers_loads_shards_and_tokenizer(chatty: Path, tmp_path: Path) -> None:
    folder = convert(chatty, tmp_path / "hf", max_shard_size="100KB")
    model, twin = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, chatty))
    assert_same(model.state_dict(), twin.state_dict())
    text = "I love Beijing, because"
    ids = [AutoTokenizer.from_pretrained(path)(text)["input_ids"] for path in (folder, chatty)]
    assert ids[0] == ids[1]


def test_files_are_at_most_of_the_size_given(source: Path, tmp_path: Path) -> None:
    folder = convert(source, tmp_path / "hf", max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert [file.name for file in shards] == [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in shards]
    assert max(sizes) <= 20_000
    assert all(one + two > 20_000 - 8192 for one, two in zip(sizes, sizes[1:], strict=False))  # the largest tensor's
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert {name: file.name for file in shards for name in load_file(file)} == index["weight_map"]
    assert_same(tensors_in(folder), make_tensors())
    verify_manifest(folder)
    alone = convert(source, tmp_path / "alone", max_shard_size="1")  # a tensor is never split
    assert len(list(alone.glob("model-*"))) == len(make_tensors())


def test_shards_of_a_source_in_shards(tmp_path: Path) -> None:
    tensors = make_tensors()
    listed = list(tensors.items())
    (tmp_path / "source").mkdir()
    folder = write_shards(tmp_path / "source", [dict(listed[i::3]) for i in range(3)])
    assert_same(tensors_in(convert(folder, tmp_path / "hf")), tensors)
    sharded = convert(folder, tmp_path / "sharded", format=SHARDED, tp=2, pp=2)
    assert_same(tensors_in(convert(sharded, tmp_path / "back")), tensors)


@each("settings", [{}, {"format": SHARDED, "tp": 2}])
def test_tensors_keep_their_types_or_are_cast(settings: dict[str, Any], tmp_path: Path) -> None:
    tensors = make_tensors()
    for i, name in enumerate(tensors):
        tensors[name] = tensors[name].to((torch.float32, torch.bfloat16, torch.float16)[i % 3])
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}  # not a parameter
    (tmp_path / "source").mkdir()
    source = write_whole(tmp_path / "source", tensors | frequencies, torch_dtype="float32")
    kept = convert(source, tmp_path / "kept", **settings)
    cast = convert(source, tmp_path / "cast", dtype=ConvertDType.bfloat16, **settings)
    files = [open_checkpoint(folder, False).open_weights({})[0] for folder in (kept, cast)]
    file_tensors = [dict(file.read(file.shapes)) for file in files]
    assert_same(file_tensors[0], tensors | frequencies)
    assert_same(file_tensors[1], {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()} | frequencies)
    dtypes = [json.loads((folder / "config.json").read_text())["torch_dtype"] for folder in (kept, cast)]
    assert dtypes == ["float32", "bfloat16"]


def test_a_pickled_source_needs_permission(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = write_whole(tmp_path / "source", make_tensors())
    torch.save(make_tensors(), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"only pickled weights .*model\.allow_pickle=true"):
        convert(source, tmp_path / "hf")
    assert_same(tensors_in(convert(source, tmp_path / "hf", {"allow_pickle": True})), make_tensors())


MEASURE = """
import resource, sys
from pathlib import Path
from conf.compose import dump
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import CheckpointFormat, ConvertConfig
from pipelines.tasks.convert import run_convert

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
def convert(source, target, **settings):
    settings = ConvertConfig(output=target, **settings)
    run_convert(RunConfig(Task.convert, ModelConfig(source), convert=settings), Path(f"{target}-run"), lambda *_: "")
    return target

small, large, out = sys.argv[1:]
division = {"format": CheckpointFormat.sharded, "tp": 2, "pp": 2}
for name, source in ("small", small), ("large", large):
    before = peak()
    convert(convert(source, f"{out}/{name}-sharded", **division), f"{out}/{name}-hf")
print(peak() - before)
"""


@pytest.mark.long
@true_starts()
def test_peak_memory_is_a_tensor(source: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    tensors = make_tensors(32)
    sizes = {"hidden_size": 32 * 32, "intermediate_size": 48 * 32, "vocab_size": 64 * 32}
    large = write_whole(tmp_path / "large", tensors, **sizes)
    command = [sys.executable, "-c", START, sys.executable, "-c", MEASURE, str(source), str(large), str(tmp_path)]
    # glibc keeps freed memory of up to 32 MB apiece, so here it must return all at once.
    returned = environment() | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=returned, stdout=subprocess.PIPE, check=True, text=True)
    peak = int(done.stdout.splitlines()[-1])
    largest = max(tensor.nbytes for tensor in tensors.values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert_same(tensors_in(tmp_path / "large-hf"), tensors)
    for folder in (large, tmp_path / "large-hf", tmp_path / "large-sharded"):
        shutil.rmtree(folder)  # folders of past tests are kept for a while
    assert peak < 2 * largest  # the tensor and a piece of it, which is half; measured 1.5
    assert 8 * largest < total


@pytest.mark.long
def test_the_command_line(source: Path, tmp_path: Path) -> None:
    arguments = ["task=convert", f"model.path={source}", f"hydra.run.dir={tmp_path / 'run'}"]
    sharded = ["convert.format=sharded", "convert.tp=2", "convert.pp=2"]
    done = run(*arguments, *sharded, f"convert.output={tmp_path / 'made'}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"model: {tmp_path / 'made'}" in done.stdout
    verified = run(f"model.path={tmp_path / 'made'}", "model.verify=true", "task=bench", "bench.prompt_tokens=5",
                   "bench.new_tokens=2", "bench.repeats=1", f"hydra.run.dir={tmp_path / 'bench'}")  # fmt: skip
    assert verified.returncode == 0, verified.stderr


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real small models of ../shared")
def test_a_real_model_goes_and_comes_back(tmp_path: Path) -> None:
    folder = SHARED / "data" / "models" / "stories260K"
    sharded = convert(folder, tmp_path / "sharded", format=SHARDED, tp=4, pp=3)
    assert_same(tensors_in(convert(sharded, tmp_path / "hf")), load_file(folder / "model.safetensors"))
    engines = [engine_of(path, tokenizer="") for path in (folder, sharded)]
    prompt = engines[0].tokenizer.encode("Once upon a time", add_special_tokens=True)  # type: ignore[union-attr]
    assert torch.equal(*(all_logits(engine, prompt) for engine in engines))

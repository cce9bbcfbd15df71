"""Damaged and hostile folders: the C++ runner gives tokens or a line, and never crashes."""

import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.quantization import Activations, KVCacheFormat, QuantConfig, QuantScheme
from conf.schema import DType
from kernels import build
from models.exported.description import EXPORT, GRAPH, WEIGHTS
from tests.helpers.cases import each
from tests.helpers.exports import INT8, Exports, family_model, wide_llama
from tests.helpers.runner import call, leaves

pytestmark = [
    pytest.mark.skipif(build.library() is None, reason="the kernels are not built here"),
    pytest.mark.long,  # compiling the runner takes 15 s
]


@pytest.fixture(scope="module")
def export_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.of(family_model("llama3", tmp_path_factory.mktemp("llama") / "model", INT8))


@pytest.fixture(scope="module")
def recurrent_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.of(family_model("lfm2", tmp_path_factory.mktemp("lfm2") / "model"))


@pytest.fixture(scope="module")
def latent_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    int8_cache = QuantConfig(kv_cache=KVCacheFormat.int8)
    return exports.of(family_model("deepseek_v3", tmp_path_factory.mktemp("deepseek") / "model", int8_cache))


@pytest.fixture(scope="module")
def window_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.of(family_model("qwen2", tmp_path_factory.mktemp("qwen2") / "model"))


def test_graphs_that_the_runner_does_not_support_are_refused(runner: Path, exports: Exports, tmp_path: Path) -> None:
    a8w8 = QuantConfig(QuantScheme.a8w8, activations=Activations.dynamic)
    made = exports.of(wide_llama(tmp_path / "a8w8", DType.bfloat16, a8w8))
    assert "the runner does not support torch.ops.quintet." in call(runner, made, "3").stderr


@each(
    "side, changes, line",
    [
        (0, {"format": "int2"}, "the runner does not support a cache of int2"),
        (0, {"channels": 0}, "a count is not a number above 0"),
        (0, {"channels": 2**40}, "a count is not a number above 0"),
        (0, {"channels": 2**30, "num_heads": 2**30}, "a tensor is too large"),
        (0, {"channels": 48}, "kv_store.default cannot be computed: key_cache has a format that differs from export.json"),
        (0, {"format": "fp8"}, "kv_store.default cannot be computed: key_cache has a format that differs from export.json"),
        (0, {"format": "int4, 4 groups"}, "key_cache has a format that differs from export.json"),
        (0, {"format": "none"}, "the inputs of its graph do not fit export.json"),
        (0, {"scales": "none"}, "it has no scales of its cache"),
        (1, {"channels": -1}, "a count is not a number above 0"),
        (1, {"format": "int8"}, "a count is not a number above 0"),
    ],
)  # fmt: skip
def test_descriptions_of_caches(
    side: int, changes: dict[str, Any], line: str, latent_folder: Path, runner: Path, tmp_path: Path
) -> None:
    """Latents with codes: a key has 32 channels, and there are no values."""
    folder = Path(shutil.copytree(latent_folder, tmp_path / "copy", dirs_exist_ok=True))
    content = json.loads((folder / EXPORT).read_text())
    content["cache"][side] |= changes
    (folder / EXPORT).write_text(json.dumps(content))
    ran = call(runner, folder, "3", "4", "5")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert line in ran.stderr


def test_folders_that_the_runner_cannot_run_are_refused(export_folder: Path, runner: Path, tmp_path: Path) -> None:
    ran = call(runner, tmp_path / "none", "3")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "export.json cannot be read (No such file or directory)" in ran.stderr
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy"))
    content = json.loads((folder / EXPORT).read_text())
    (folder / EXPORT).write_text(json.dumps({**content, "instruction_set": "sve"}))
    assert "it was exported for sve, and this runner was built for " in call(runner, folder, "3").stderr
    for divided in ({"tp": 2, "pp": 1, "sha256": {}}, {**content, "part": {}}):
        (folder / EXPORT).write_text(json.dumps(divided))
        assert "cannot be run: it is sharded: run it by run.py" in call(runner, folder, "3").stderr


def read_document(folder: Path) -> dict[str, Any]:
    with zipfile.ZipFile(folder / GRAPH) as archive:
        document: dict[str, Any] = json.loads(archive.read("graph/models/model.json"))
    return document


def write_document(folder: Path, document: dict[str, Any]) -> None:
    with zipfile.ZipFile(folder / GRAPH, "w") as archive:
        archive.writestr("graph/models/model.json", json.dumps(document))


def node_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of the last call of an operator, by name."""
    nodes = document["graph_module"]["graph"]["nodes"]
    return {argument["name"]: argument for argument in [n for n in nodes if f".{name}." in n["target"]][-1]["inputs"]}


def other_slots(document: dict[str, Any]) -> None:
    node_of(document, "rope_and_store")["slots"]["arg"] = {"as_tensor": {"name": "fields_token_ids"}}


def all_starts(document: dict[str, Any]) -> None:
    node_of(document, "paged_attention")["query_starts"]["arg"] = {"as_tensor": {"name": "fields_query_starts"}}


def longer_weight(document: dict[str, Any]) -> None:
    node_of(document, "matmul_swiglu")["up_num_outputs"]["arg"]["as_int"] = 4096


def unknown_argument(document: dict[str, Any]) -> None:
    node_of(document, "rms_norm")["eps"]["name"] = "epsilon"


def number_for_logits(document: dict[str, Any]) -> None:
    document["graph_module"]["graph"]["outputs"][1] = {"as_int": 2**40}


def number_for_a_tensor(document: dict[str, Any]) -> None:
    node_of(document, "rms_norm")["x"]["arg"] = {"as_int": 3}


def tables_for_slots(document: dict[str, Any]) -> None:
    node_of(document, "rope_and_store")["slots"]["arg"] = {"as_tensor": {"name": "fields_window_tables"}}


def slots_for_tables(document: dict[str, Any]) -> None:
    node_of(document, "paged_attention")["block_tables"]["arg"] = {"as_tensor": {"name": "fields_window_slots"}}


def viewed_weight(document: dict[str, Any]) -> None:
    """A weight whose size may change in a later step, although it was checked in the first."""
    memory = node_of(document, "matmul_swiglu")["up_memory"]["arg"]["as_tensor"]
    arguments = {"self": {"as_tensor": {**memory}}, "dim": {"as_int": 0}, "sizes": {"as_ints": [1, -1]}}
    inputs = [{"name": name, "arg": argument} for name, argument in arguments.items()]
    node = {"target": "torch.ops.aten.unflatten.int", "inputs": inputs, "outputs": [{"as_tensor": {"name": "viewed"}}]}
    document["graph_module"]["graph"]["nodes"].insert(0, node)
    memory["name"] = "viewed"


def part_of_a_split(document: dict[str, Any]) -> None:
    arguments = {"self": {"as_tensor": {"name": "fields_token_ids"}}, "split_sizes": {"as_ints": [1]}}
    inputs = [{"name": name, "arg": argument} for name, argument in arguments.items()]
    node = {
        "target": "torch.ops.aten.split_with_sizes.default",
        "inputs": inputs,
        "outputs": [{"as_tensor": {"name": "part"}}],
    }
    document["graph_module"]["graph"]["nodes"].insert(0, node)


def computed_weight(document: dict[str, Any]) -> None:
    node_of(document, "matmul_together")["weights_memory"]["arg"]["as_tensors"] = [{"name": "embedding"}]


def other_reads(document: dict[str, Any]) -> None:
    node_of(document, "short_conv")["reads"]["arg"] = {"as_tensor": {"name": "fields_positions"}}


def weight_for_a_state(document: dict[str, Any]) -> None:
    arguments = node_of(document, "short_conv")
    arguments["states"]["arg"] = arguments["weight"]["arg"]


def keys_for_a_state(document: dict[str, Any]) -> None:
    (keys, *_) = node_of(document, "rope_and_store")["key_cache_tensors"]["arg"]["as_tensors"]
    node_of(document, "short_conv")["states"]["arg"] = {"as_tensor": keys}


def state_for_keys(document: dict[str, Any]) -> None:
    state = node_of(document, "short_conv")["states"]["arg"]["as_tensor"]
    node_of(document, "rope_and_store")["key_cache_tensors"]["arg"] = {"as_tensors": [state]}


def more_channels(document: dict[str, Any]) -> None:
    node_of(document, "paged_attention")["value_cache_channels"]["arg"] = {"as_int": 33}


def fewer_channels(document: dict[str, Any]) -> None:
    node_of(document, "kv_store")["key_cache_channels"]["arg"] = {"as_int": 24}


def no_channels(document: dict[str, Any]) -> None:
    """The values of the cache, which has none."""
    attended, stored = node_of(document, "paged_attention"), node_of(document, "kv_store")
    for name in ("tensors", "format", "channels"):
        attended[f"value_cache_{name}"]["arg"] = stored[f"value_cache_{name}"]["arg"]


def codes_without_scales(document: dict[str, Any]) -> None:
    del node_of(document, "paged_attention")["value_cache_tensors"]["arg"]["as_tensors"][1]


def scales_twice(document: dict[str, Any]) -> None:
    tensors = node_of(document, "kv_store")["key_cache_tensors"]["arg"]["as_tensors"]
    tensors[0] = tensors[1]


def static_scales(document: dict[str, Any]) -> None:
    arguments = node_of(document, "kv_store")
    arguments["key_cache_scales"]["arg"] = node_of(document, "rms_norm")["weight"]["arg"]


def axis_of_a_slice(document: dict[str, Any]) -> None:
    node_of(document, "slice")["dim"]["arg"] = {"as_int": 3}


def axis_of_no_tensor(document: dict[str, Any]) -> None:
    node_of(document, "unsqueeze")["dim"]["arg"] = {"as_int": 2**40}


def wider_angles(document: dict[str, Any]) -> None:
    node_of(document, "rope")["x"]["arg"] = node_of(document, "rope")["cos"]["arg"]


def fewer_heads(document: dict[str, Any]) -> None:
    del node_of(document, "matmul_per_head")["weights_memories"]["arg"]["as_tensors"][0]


LATENT_HARMS = (
    more_channels,
    fewer_channels,
    no_channels,
    codes_without_scales,
    scales_twice,
    static_scales,
    axis_of_a_slice,
    axis_of_no_tensor,
    wider_angles,
    fewer_heads,
)
WINDOW_HARMS = (tables_for_slots, slots_for_tables)
RECURRENT_HARMS = (other_reads, weight_for_a_state, keys_for_a_state, state_for_keys)


UNFIT = "its arguments do not have the expected shapes and types"


@each(
    "harm, line",
    [
        (
            more_channels,
            "paged_attention.default cannot be computed: value_cache has a format that differs from export",
        ),
        (fewer_channels, "kv_store.default cannot be computed: key_cache has a format that differs from export.json"),
        (no_channels, f"paged_attention.default cannot be computed: {UNFIT}"),
        (codes_without_scales, "paged_attention.default cannot be computed: value_cache has a format that differs"),
        (scales_twice, "kv_store.default cannot be computed: keys or values are not a tensor of the cache"),
        (static_scales, "kv_store.default cannot be computed: key_cache has a format that differs from export.json"),
        (axis_of_a_slice, "slice.Tensor cannot be computed: an axis does not exist"),
        (axis_of_no_tensor, f"unsqueeze.default cannot be computed: {UNFIT}"),
        (wider_angles, f"rope.default cannot be computed: {UNFIT}"),
        (fewer_heads, f"matmul_per_head.default cannot be computed: {UNFIT}"),
        (other_reads, "short_conv.default cannot be computed: reads is not the batch's field of this name"),
        (weight_for_a_state, "short_conv.default cannot be computed: a state is not a recurrent state of the cache"),
        (keys_for_a_state, "short_conv.default cannot be computed: a state is not a recurrent state of the cache"),
        (state_for_keys, "rope_and_store.default cannot be computed: keys or values are not a tensor of the cache"),
        (other_slots, "rope_and_store.default cannot be computed: slots is not the batch's field of this name"),
        (tables_for_slots, "rope_and_store.default cannot be computed: slots is not the batch's field of this name"),
        (slots_for_tables, "paged_attention.default cannot be computed: block_tables is not the batch's field of this"),
        (all_starts, f"paged_attention.default cannot be computed: {UNFIT}"),
        (longer_weight, f"matmul_swiglu.default cannot be computed: {UNFIT}"),
        (unknown_argument, "rms_norm.default cannot be computed: epsilon is not known"),
        (number_for_logits, "a value is not a tensor"),
        (number_for_a_tensor, "rms_norm.default cannot be computed: a value is not a tensor"),
        (
            viewed_weight,
            "matmul_swiglu.default cannot be computed: a weight argument is not a weight of the exported model",
        ),
        (part_of_a_split, f"split_with_sizes.default cannot be computed: {UNFIT}"),
        (
            computed_weight,
            "matmul_together.default cannot be computed: a weight argument is not a weight of the exported model",
        ),
    ],
)
def test_hostile_graphs(
    harm: Callable[[dict[str, Any]], None],
    line: str,
    export_folder: Path,
    recurrent_folder: Path,
    latent_folder: Path,
    window_folder: Path,
    runner: Path,
    tmp_path: Path,
) -> None:
    export_folder = window_folder if harm in WINDOW_HARMS else export_folder
    export_folder = recurrent_folder if harm in RECURRENT_HARMS else export_folder
    export_folder = latent_folder if harm in LATENT_HARMS else export_folder
    folder = Path(shutil.copytree(export_folder, tmp_path / "copy", dirs_exist_ok=True))
    document = read_document(export_folder)
    harm(document)
    write_document(folder, document)
    ran = call(runner, folder, "3", "4", "5")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert line in ran.stderr


def damage(folder: Path, chooser: random.Random) -> None:
    """Change a value of the graph or its description, change a byte of a file, or truncate it."""
    others = [0, -1, 1, 2**40, -(2**63), 2**70, "", None, True, "fields_token_ids", [], {}, 1e300]
    kind = chooser.choice(["graph", "graph", "graph", EXPORT, "byte", "cut"])
    if kind == "graph":
        document = read_document(folder)
        graph = document["graph_module"]["graph"]
        holder, key = chooser.choice(leaves({name: graph[name] for name in ("nodes", "inputs", "outputs")}))
        holder[key] = chooser.choice(others)
        write_document(folder, document)
    elif kind == EXPORT:
        content = json.loads((folder / EXPORT).read_text())
        holder, key = chooser.choice(leaves({name: content[name] for name in content if name != "operators"}))
        holder[key] = chooser.choice(others)
        (folder / EXPORT).write_text(json.dumps(content))
    else:
        file = folder / chooser.choice([EXPORT, GRAPH, WEIGHTS])
        content = bytearray(file.read_bytes())
        place = chooser.randrange(min(len(content), 6000))
        content[place] ^= chooser.randrange(1, 256)
        file.write_bytes(content if kind == "byte" else content[:place])


def test_two_hundred_damaged_archives(
    export_folder: Path, recurrent_folder: Path, latent_folder: Path, window_folder: Path, runner: Path, tmp_path: Path
) -> None:
    """A damaged archive gives tokens or a line, and never a crash."""
    num_refused = 0
    for seed in range(200):
        made = (recurrent_folder, latent_folder, export_folder, window_folder)[seed % 4]
        folder = Path(shutil.copytree(made, tmp_path / str(seed)))
        damage(folder, random.Random(seed))
        ran = call(runner, folder, "device.threads=1", "decode.max_new_tokens=2", "3", "4", "5")
        assert ran.returncode in (0, 1), f"{seed}: {ran.returncode} {ran.stderr}"
        assert len(ran.stderr.splitlines()) == ran.returncode, seed
        num_refused += ran.returncode
        shutil.rmtree(folder)
    assert num_refused > 100

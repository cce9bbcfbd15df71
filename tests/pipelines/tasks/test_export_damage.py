"""Damaged and hostile files of an exported model: one line each, and never a crash."""

import hashlib
import json
import os
import pickle
import random
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig
from kernels.lora import AdapterTable
from models.adapters import adaptable_layers
from models.batch import Batch, KVCache
from models.exported.description import ADAPTED_GRAPH, EXPORT, GRAPH, WEIGHTS, read_description
from models.exported.graph import DamagedGraphError, graph_inputs
from models.exported.model import ExportedLM, GraphEmbedding
from models.exported.reader import build_graph, read_graph
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.loading.load_engine import load_engine
from pipelines.tasks import export_steps
from tests.helpers.builders import generate, run_config
from tests.helpers.cases import each
from tests.helpers.catalog import link
from tests.helpers.exports import A8W8, INT4, INT8_INT4_CACHE, Exports, llama
from tests.helpers.hybrid_families import HYBRID


@pytest.fixture(scope="module")
def export_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.of(llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def recurrent_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export whose layers are recurrent, attention, recurrent, recurrent."""
    folder = tmp_path_factory.mktemp("recurrent")
    HYBRID["lfm2"].write(folder, **HYBRID["lfm2"].variants[0])
    return exports.of(run_config(folder))


@pytest.fixture(scope="module")
def window_folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export whose second layer has a window of 8 tokens."""
    return exports.of(run_config(link("qwen2", tmp_path_factory.mktemp("windows"))))


@pytest.fixture
def copy(export_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export_folder, tmp_path / "copy"))


def check_one_line(folder: Path, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        load_engine(run_config(folder), 1)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def fit(folder: Path, file: str = GRAPH) -> None:
    """Write the file's sha256 into export.json."""
    content = json.loads((folder / EXPORT).read_text())
    content["sha256"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    (folder / EXPORT).write_text(json.dumps(content))


CUT = {
    GRAPH: "graph.pt2 is damaged .its sha256 is not the one",
    WEIGHTS: "weights.safetensors is damaged .*incomplete metadata",
    EXPORT: "export.json cannot be read: Unterminated string",
}


@each("file", CUT)
def test_a_file_cut_short(file: str, export_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(export_folder, tmp_path / file))
    (copy / file).write_bytes((copy / file).read_bytes()[:-200])
    check_one_line(copy, CUT[file])
    if file == GRAPH:
        fit(copy)
        check_one_line(copy, "graph.pt2 is damaged .it is not an archive .File is not a zip file")


def test_a_pipe_in_the_place_of_a_graph(copy: Path) -> None:
    (copy / GRAPH).unlink()
    os.mkfifo(copy / GRAPH)
    check_one_line(copy, "graph.pt2 is damaged .it is not a file.: export the model")


def test_a_changed_byte(copy: Path) -> None:
    content, chooser = (copy / GRAPH).read_bytes(), random.Random(0)
    for _ in range(50):
        place = chooser.randrange(len(content))
        (copy / GRAPH).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        check_one_line(copy, "graph.pt2 is damaged .its sha256 is not the one in export.json.: export the model")


def test_a_changed_weight(copy: Path) -> None:
    """On request, every file is compared with the manifest."""
    content = bytearray((copy / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (copy / WEIGHTS).write_bytes(content)
    with pytest.raises(UserError, match=r"weights.safetensors") as error:
        load_engine(run_config(copy, verify=True), 1)
    assert "\n" not in str(error.value)


class Trap:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_pickles_in_an_archive_are_not_read(copy: Path, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "unpickled"))
    with zipfile.ZipFile(copy / GRAPH) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    names = [name for name in contents if name.endswith(".pt")]
    with zipfile.ZipFile(copy / GRAPH, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, trap if name in names else content)
    fit(copy)
    load_engine(run_config(copy), 1)
    assert names
    assert not (tmp_path / "unpickled").exists()
    pickle.loads(trap)  # it would have made it
    assert (tmp_path / "unpickled").exists()


def test_a_damaged_graph_with_adapters(copy: Path) -> None:
    """A run with adapters reads it before the first step."""
    (copy / ADAPTED_GRAPH).write_bytes(b"PK")
    load_engine(run_config(copy), 1)
    with pytest.raises(UserError, match="adapted.pt2 is damaged .its sha256 is not the one"):
        load_engine(run_config(copy, adapters={"a": "nowhere"}), 1)


SIDE: dict[str, Any] = {"num_heads": 2, "channels": 16, "format": "none", "scales": None}


@each(
    "settings, line",
    [
        ({"sha256": {}}, "export.json is damaged .'graph.pt2'"),
        ({"sha256": {GRAPH: 3, ADAPTED_GRAPH: ""}}, "export.json is damaged"),
        ({"linears": {"config": [1, 1]}}, "is damaged .*config"),
        ({"linears": {"graph": [1, 1]}}, "is damaged .*graph"),
        ({"linears": {"weight_0": [1, 1]}}, "is damaged .*weight_0"),
        ({"key_border": -1}, "key_border=-1"),
        ({"eos_token_ids": ["a"]}, "export.json is damaged .eos_token_ids or prompt_marks are not integers"),
        ({"prompt_marks": [["a"]]}, "export.json is damaged .eos_token_ids or prompt_marks are not integers"),
        ({"prompt_marks": 3}, "export.json is damaged .'int' object is not iterable"),
        ({"a_later_key": 1}, "export.json has unknown keys .a_later_key.: export the model again"),
        ({"linears": {"model": [2**60, 1]}}, "export.json is damaged .a count is not a number above 0"),
        ({"linears": {"model": [1]}}, "export.json is damaged .not enough values"),
        (
            {"cache": 4 * [SIDE | {"num_heads": 2**40}]},
            "export.json is damaged .heads times channels is not a number below",
        ),
        ({"cache": 4 * [SIDE | {"format": []}]}, "is damaged .unhashable type"),
        ({"cache": 4 * [SIDE | {"scales": {}}]}, "is damaged .unhashable type"),
        ({"weights": ["elsewhere"]}, "weights.safetensors is damaged .*elsewhere"),
        ({"weights": []}, "graph.pt2 is damaged"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
        ({"windows": [8]}, "export.json is damaged .windows are not null or a number above 0 for each of 2 layers"),
        ({"windows": [None, 0]}, "export.json is damaged .windows are not null or a number above 0"),
        ({"windows": [True, None]}, "export.json is damaged .windows are not null or a number above 0"),
        ({"windows": 8}, "export.json is damaged .'int' object is not iterable"),
        ({"windows": [None, 8]}, "graph.pt2 is damaged"),  # its graph has no blocks for windows
    ],
)
def test_damaged_descriptions(settings: dict[str, Any], line: str, export_folder: Path, copy: Path) -> None:
    content = json.loads((export_folder / EXPORT).read_text())
    (copy / EXPORT).write_text(json.dumps(content | settings))
    check_one_line(copy, line)


def bomb(archive: zipfile.ZipFile, text: bytes) -> None:
    archive.writestr("graph/models/model.json", b" " * 2**24, zipfile.ZIP_DEFLATED)


def compressed(archive: zipfile.ZipFile, text: bytes) -> None:
    archive.writestr("graph/models/model.json", text, zipfile.ZIP_DEFLATED)


def twice(archive: zipfile.ZipFile, text: bytes) -> None:
    for _ in range(2):
        archive.writestr("graph/models/model.json", text)


def outside(name: str) -> Callable[[zipfile.ZipFile, bytes], None]:
    def write(archive: zipfile.ZipFile, text: bytes) -> None:
        archive.writestr("graph/models/model.json", text)
        archive.writestr(name, b"")

    return write


@each(
    "write, line",
    [
        (bomb, "its entry 'graph/models/model.json' is compressed"),
        (compressed, "its entry 'graph/models/model.json' is compressed"),
        (twice, "it has two entries 'graph/models/model.json'"),
        (outside("/etc/passwd"), "its entry '/etc/passwd' is outside of the archive"),
        (outside("graph/../../x"), "its entry 'graph/../../x' is outside of the archive"),
        (outside("other/models/model.json"), "it holds no graph"),
        (lambda archive, text: None, "it holds no graph"),
        (lambda archive, text: archive.writestr("graph/models/model.json", b"[" * 10**5), "it holds no graph"),
        (lambda archive, text: archive.writestr("graph/models/model.json", b"{}"), "it holds no graph"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_archives(
    write: Callable[[zipfile.ZipFile, bytes], None], line: str, export_folder: Path, copy: Path
) -> None:
    with zipfile.ZipFile(export_folder / GRAPH) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith("/models/model.json")))
    with zipfile.ZipFile(copy / GRAPH, "w") as archive:
        write(archive, text)
    fit(copy)
    check_one_line(copy, f"graph.pt2 is damaged .{line}")


class Step(NamedTuple):
    """The inputs of a graph."""

    model: ExportedLM
    batch: Batch
    cache: KVCache
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def step(export_folder: Path) -> Step:
    return step_of(export_folder)


@pytest.fixture(scope="module")
def window_step(window_folder: Path) -> Step:
    return step_of(window_folder)


def step_of(export_folder: Path) -> Step:
    model = load_engine(run_config(export_folder), 1).executor.model
    assert isinstance(model, ExportedLM)
    is_recurrent = model.config.capabilities.is_recurrent
    batch = export_steps._adapted(export_steps._batches(model.config.vocab_size, is_recurrent=is_recurrent)[0])
    counts, settings = (8, 8), (model.kv_formats, torch.float32, torch.device("cpu"))
    cache = allocate_kv_cache(model.layer_caches, 8, 16, *settings, *counts)
    for layer in adaptable_layers(model).values():
        outputs, inputs = layer.shape
        layer.adapters = AdapterTable.empty(2, 3, inputs, outputs, torch.float32, torch.device("cpu"))
        layer.adapters.put(0, torch.full((3, inputs), 0.01), torch.full((outputs, 3), 0.01), 0.5)
    return Step(model, batch, cache, model._weights)


def graph_of(export_folder: Path, file: str) -> dict[str, Any]:
    return read_graph(export_folder / file, read_description(export_folder).sha256[file])


def compute(graph: dict[str, Any], step: Step, file: str) -> Tensor:
    """Return logits [R, V] of a graph."""
    description, layers = step.model.description, [*adaptable_layers(step.model).values()]
    names, layers = (description.weights, []) if file == GRAPH else (description.adapted_weights, layers)
    fields, embedding = graph_inputs(step.model, file == ADAPTED_GRAPH), GraphEmbedding(description.embedding_dim)
    weights = {name: step.weights[name] for name in names}
    for part in (*step.cache.tensors, *step.cache.states):
        part.zero_()
    cache = description.empty_cache(step.weights)
    built = build_graph(graph, fields, cache, description.local_windows, weights, embedding, layers)
    return built.compute_logits(built.compute_hidden(step.batch, step.cache), step.batch)


def node_of(graph: dict[str, Any], operator: str, number: int = 0) -> dict[str, Any]:
    call: dict[str, Any] = [node for node in graph["nodes"] if f".{operator}." in node["target"]][number]
    return call


def give(node: dict[str, Any], name: str, argument: Any) -> None:
    next(input for input in node["inputs"] if input["name"] == name)["arg"] = argument


def argument_of(node: dict[str, Any], name: str) -> Any:
    return next(input["arg"] for input in node["inputs"] if input["name"] == name)


def other_function(graph: dict[str, Any]) -> None:
    graph["nodes"][3]["target"] = "torch.ops.aten.from_file.default"


def slots_of_tokens(graph: dict[str, Any]) -> None:
    give(node_of(graph, "rope_and_store"), "slots", graph["inputs"][0])


def starts_of_all(graph: dict[str, Any]) -> None:
    give(node_of(graph, "paged_attention", -1), "query_starts", graph["inputs"][3])


def longer_weight(graph: dict[str, Any]) -> None:
    give(node_of(graph, "matmul_swiglu"), "gate_num_outputs", {"as_int": 4096})


def adapters_of_tokens(graph: dict[str, Any]) -> None:
    give(node_of(graph, "lora_add"), "slots", graph["inputs"][0])


def sum_in_a_weight(graph: dict[str, Any]) -> None:
    give(node_of(graph, "lora_add"), "y", argument_of(node_of(graph, "embedding"), "weight"))


def tables_of_two_layers(graph: dict[str, Any]) -> None:
    give(node_of(graph, "lora_add"), "table_b", argument_of(node_of(graph, "lora_add", 1), "table_b"))


def table_of_another_layer(graph: dict[str, Any]) -> None:
    first, last = node_of(graph, "lora_add"), node_of(graph, "lora_add", -1)
    for part in ("a", "b", "ranks", "scales"):
        give(first, f"table_{part}", argument_of(last, f"table_{part}"))


def table_of_weights(graph: dict[str, Any]) -> None:
    give(node_of(graph, "lora_add"), "table_a", argument_of(node_of(graph, "embedding"), "weight"))


def table_to_another(graph: dict[str, Any]) -> None:
    give(node_of(graph, "embedding"), "weight", argument_of(node_of(graph, "lora_add"), "table_a"))


def field_of_another_layer(operator: str, layer: int, argument: str, field: str) -> Callable[[dict[str, Any]], None]:
    def harm(graph: dict[str, Any]) -> None:
        give(node_of(graph, operator, layer), argument, {"as_tensor": {"name": f"fields_{field}"}})

    return harm


def values_of_another_layer(graph: dict[str, Any]) -> None:
    first, second = node_of(graph, "paged_attention"), node_of(graph, "paged_attention", 1)
    give(second, "value_cache_tensors", argument_of(first, "value_cache_tensors"))


def wider_window(graph: dict[str, Any]) -> None:
    give(node_of(graph, "paged_attention", 1), "window", {"as_int": 9})


def no_window(graph: dict[str, Any]) -> None:
    give(node_of(graph, "paged_attention", 1), "window", {"as_none": True})


WINDOW_HARMS = {
    field_of_another_layer(operator, layer, argument, other): f"{argument} of {operator} are not computed by {own}"
    for operator, argument, fields in (
        ("paged_attention", "block_tables", ("block_tables", "window_tables")),
        ("rope_and_store", "slots", ("slots", "window_slots")),
    )
    for layer, (own, other) in enumerate((fields, fields[::-1]))
} | {
    values_of_another_layer: "the keys and the values of paged_attention have different windows in export.json",
    wider_window: "paged_attention has another window than its layer in export.json, 8 tokens",
    no_window: "paged_attention has another window than its layer in export.json, 8 tokens",
}
"""Layers with windows have fewer blocks: the numbers of other layers' blocks are outside of theirs."""


@each(
    "file, harm, line",
    [
        (GRAPH, other_function, "'torch.ops.aten.from_file.default' is not a function of a model"),
        (GRAPH, slots_of_tokens, "slots of rope_and_store are not computed by slots"),
        (GRAPH, starts_of_all, "rows or choices, expected"),
        (GRAPH, longer_weight, "packed weights? .* cannot be"),
        (ADAPTED_GRAPH, adapters_of_tokens, "slots of lora_add are not computed by adapter_slots or"),
        (ADAPTED_GRAPH, sum_in_a_weight, "y of lora_add are not computed by linear.0"),
        (ADAPTED_GRAPH, tables_of_two_layers, "an adapter argument is not the adapter table of a layer"),
        (ADAPTED_GRAPH, table_of_another_layer, "rows or choices, expected"),
        (
            ADAPTED_GRAPH,
            table_of_weights,
            "an adapter argument is not the adapter table of a layer|no attribute 'layer'",
        ),
        (ADAPTED_GRAPH, table_to_another, "the cache or adapters are arguments of a function that does not take them"),
        *((GRAPH, harm, line) for harm, line in WINDOW_HARMS.items()),
    ],
)
def test_hostile_graphs(
    file: str,
    harm: Callable[[dict[str, Any]], None],
    line: str,
    export_folder: Path,
    step: Step,
    window_folder: Path,
    window_step: Step,
) -> None:
    export_folder, step = (window_folder, window_step) if harm in WINDOW_HARMS else (export_folder, step)
    graph = graph_of(export_folder, file)
    harm(graph)
    with pytest.raises(DamagedGraphError, match=line):
        compute(graph, step, file)


def weight_for_a_state(graph: dict[str, Any]) -> None:
    give(node_of(graph, "short_conv"), "states", argument_of(node_of(graph, "rms_norm"), "weight"))


def reads_of_positions(graph: dict[str, Any]) -> None:
    give(node_of(graph, "short_conv"), "reads", graph["inputs"][1])


def projected_weight(graph: dict[str, Any]) -> None:
    give(node_of(graph, "short_conv"), "projected", argument_of(node_of(graph, "short_conv"), "weight"))


def short_bias(graph: dict[str, Any]) -> None:
    give(node_of(graph, "short_conv"), "bias", argument_of(node_of(graph, "rope_and_store"), "query_norm"))


def state_to_another(graph: dict[str, Any]) -> None:
    give(node_of(graph, "rms_norm"), "x", argument_of(node_of(graph, "short_conv"), "states"))


def test_damaged_states(recurrent_folder: Path, tmp_path: Path) -> None:
    """In export.json, and as arguments of the operator that writes into them."""
    copy = Path(shutil.copytree(recurrent_folder, tmp_path / "copy"))
    content = json.loads((copy / EXPORT).read_text())
    state, (first, *others) = {"shape": [2, 64], "dtype": "float32"}, content["states"]
    assert first == [state]
    for settings, line in (
        ({"states": None}, "export.json is damaged .layer 0 needs keys and values, or states"),
        ({"states": [[], *others]}, "graph.pt2 is damaged"),  # a layer may have no cache
        ({"states": [first] * 4}, "graph.pt2 is damaged"),  # a layer may have keys, values and states
        ({"states": others}, "export.json is damaged .cache has 8 entries, expected two for each of 3 layers"),
        ({"states": 3}, "export.json is damaged .'int' object is not iterable"),
        ({"states": [[state | {"shape": [2, 0]}], *others]}, r"the shape \(2, 0\), expected 1 to 2\*\*31 - 1 numbers"),
        ({"states": [[state | {"shape": [2**16, 2**16]}], *others]}, "expected 1 to 2..31 - 1 numbers"),
        ({"states": [[state | {"dtype": "int64"}], *others]}, "a state has the dtype int64, expected float32"),
        ({"states": [[{"shape": [2, 64]}], *others]}, "export.json is damaged .'dtype'"),
        ({"states": [first * 2, *others]}, "graph.pt2 is damaged"),
    ):
        (copy / EXPORT).write_text(json.dumps(content | settings))
        check_one_line(copy, line)
    (copy / EXPORT).write_text(json.dumps(content | {"states": [[state | {"shape": [3, 64]}], *others]}))
    assert f"{copy} is damaged (short_conv cannot be computed: " in line_of(copy)
    step = step_of(recurrent_folder)
    for harm, line in (
        (weight_for_a_state, "states of short_conv are not computed by state"),
        (reads_of_positions, "reads of short_conv are not computed by state_reads"),
        (projected_weight, "rows or choices, expected"),
        (short_bias, "short_conv cannot be computed: RuntimeError"),
        (state_to_another, "the cache or adapters are arguments of a function that does not take them"),
    ):
        graph = graph_of(recurrent_folder, GRAPH)
        harm(graph)
        with pytest.raises(DamagedGraphError, match=line):
            compute(graph, step, GRAPH)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return the paths of all values in a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Return the paths of all numbers and texts in a JSON value."""
    return [(holder, key) for holder, key in places(value) if not isinstance(holder[key], dict | list)]


OTHERS = [0, -1, 1, 2**40, -(2**63), "", None, True, "fields_token_ids", [], {}, 1e300]


def line_of(folder: Path) -> str:
    """Return the error line of a damaged folder; "" if it generates tokens."""
    try:
        generate(load_engine(run_config(folder), 1), [[0]], DecodeConfig(max_new_tokens=1))
    except UserError as error:
        return str(error)
    return ""


def damage_description(folder: Path, chooser: random.Random, other: Any) -> None:
    content = json.loads((folder / EXPORT).read_text())
    of_values = {key: content[key] for key in ("cache", "linears", "quant", "sha256")}
    holder, key = chooser.choice([*places(of_values), *((content, key) for key in content)])
    holder = content if holder is of_values else holder
    holder[key] = other
    (folder / EXPORT).write_text(json.dumps(content))


def damage_archive(folder: Path, chooser: random.Random, other: Any) -> None:
    """Change a byte, most often in the directory at the end, or truncate the archive."""
    content = bytearray((folder / GRAPH).read_bytes())
    place = chooser.randrange(max(0, len(content) - chooser.choice([2000, 2**30])), len(content))
    if other is None:
        del content[place:]
    else:
        content[place] = chooser.randrange(256)
    (folder / GRAPH).write_bytes(content)
    fit(folder)


def damage_weights(folder: Path, chooser: random.Random, other: Any) -> None:
    """Change a value in the header, or swap the positions of two weights."""
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if chooser.random() < 0.5:
        holder, key = chooser.choice(places(header))
        holder[key] = other
    else:
        one, two = chooser.sample([name for name in header if name != "__metadata__"], 2)
        header[one], header[two] = header[two], header[one]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


@pytest.mark.long
@each("harm", [damage_description, damage_archive, damage_weights])
def test_damaged_files_give_a_line_or_tokens(
    harm: Callable[[Path, random.Random, Any], None], export_folder: Path, tmp_path: Path
) -> None:
    """One of the three files is damaged, with its sha256 corrected."""
    counts = Counter[str]()
    for seed in range(75):
        chooser, folder = random.Random(seed), tmp_path / "made"
        shutil.copytree(export_folder, folder, dirs_exist_ok=True)
        harm(folder, chooser, chooser.choice(OTHERS))
        line = line_of(folder)
        assert "\n" not in line, seed
        assert len(line) < 1000, seed
        counts["line" if line else "tokens"] += 1
    assert counts["line"] > counts["tokens"]


@pytest.mark.long
@each("file", [GRAPH, ADAPTED_GRAPH])
def test_damaged_graphs(file: str, export_folder: Path, step: Step) -> None:
    check_places(file, export_folder, step, 0.5)


@pytest.mark.long
@each("quant", [A8W8, INT8_INT4_CACHE, INT4])
def test_damaged_graphs_of_codes(quant: QuantConfig, exports: Exports, tmp_path: Path) -> None:
    export_folder = exports.of(llama(tmp_path, quant))
    check_places(GRAPH, export_folder, step_of(export_folder), 0.25)


@pytest.mark.long
def test_damaged_graphs_of_recurrent_layers(recurrent_folder: Path) -> None:
    check_places(GRAPH, recurrent_folder, step_of(recurrent_folder), 0.5)


@pytest.mark.long
def test_damaged_graphs_of_windows(window_folder: Path, window_step: Step) -> None:
    check_places(GRAPH, window_folder, window_step, 0.5)


def check_places(file: str, export_folder: Path, step: Step, share: float) -> None:
    """Change one number or name of a graph at a time, and correct its sha256. The result is a line, or right or wrong
    logits, but never a crash.

    `share`: the share of positions that are changed, in turn.
    """
    graph, counts, chooser = graph_of(export_folder, file), Counter[str](), random.Random(0)
    for node in graph["nodes"]:
        node.pop("metadata", None)  # unread fields
    expected = compute(graph, step, file)
    every = leaves({part: graph[part] for part in ("nodes", "inputs", "outputs")})
    for holder, key in chooser.sample(every, int(share * len(every))):
        original, holder[key] = holder[key], chooser.choice(OTHERS)
        try:
            counts["right" if compute(graph, step, file).equal(expected) else "wrong"] += 1
        except DamagedGraphError:
            counts["line"] += 1
        holder[key] = original
    assert compute(graph, step, file).equal(expected)
    # 5 of 1,000 graphs: a number that is valid for another model, such as an epsilon; twice as many mean a missing
    # check
    assert counts["wrong"] <= counts.total() / 100
    assert counts["line"] > counts["right"]

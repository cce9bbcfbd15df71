"""The sharded layout: what is written is what the safetensors library reads, and whatever is wrong in a folder is one UserError."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from models.formats import open_checkpoint
from models.formats.huggingface import SafetensorsFile
from models.formats.huggingface_writer import write_huggingface
from models.formats.partition import Place
from models.formats.sharded import LAYOUT, ShardedFile, write_sharded
from tests.helpers.damage import MUTATIONS, mutated

TENSORS = {
    "whole": torch.randn(5),
    "rows": torch.randn(4, 3),
    "columns": torch.randn(3, 4).to(torch.bfloat16),
    "cube": torch.randn(2, 6, 3).to(torch.float64),
    "scalar": torch.tensor(7.5, dtype=torch.float16),
    "empty": torch.zeros(0, 3),
    "mask": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "numbers": torch.arange(6).reshape(2, 3),
}
PLACES = {name: Place(0, None) for name in TENSORS} | {
    "rows": Place(0, 0),
    "columns": Place(1, 1),
    "cube": Place(1, 1),
    "empty": Place(0, 0),
    "scalar": Place(1, None),
}


def nothing(done: int, total: int) -> None:
    pass


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsFile:
    save_file(TENSORS, tmp_path / "source.safetensors")
    return SafetensorsFile(tmp_path / "source.safetensors")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_file(TENSORS, folder / "source")
    write_sharded([SafetensorsFile(folder / "source")], folder, PLACES, 2, 2, nothing)
    (folder / "source").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_every_type_and_shape_comes_back(source: SafetensorsFile, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    sha256 = write_sharded([source], tmp_path, PLACES, 2, 2, lambda done, total: progress.append((done, total)))
    assert sorted(sha256) == [
        "rank_0_0.safetensors",
        "rank_0_1.safetensors",
        "rank_1_0.safetensors",
        "rank_1_1.safetensors",
    ]
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    assert [total for _, total in progress] == [total] * len(TENSORS)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1][0] == total
    file = ShardedFile(tmp_path)
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert file.dtypes == {name: tensor.dtype for name, tensor in TENSORS.items()}
    assert_same(dict(file.read(TENSORS)), TENSORS)


def test_pieces_are_what_the_axis_says_as_the_library_reads_them(sharded: Path) -> None:
    ranks = {name: load_file(sharded / f"rank_{name}.safetensors") for name in ("0_0", "0_1", "1_0", "1_1")}
    assert torch.equal(torch.cat((ranks["0_0"]["rows"], ranks["0_1"]["rows"])), TENSORS["rows"])
    assert torch.equal(torch.cat((ranks["1_0"]["columns"], ranks["1_1"]["columns"]), 1), TENSORS["columns"])
    assert torch.equal(torch.cat((ranks["1_0"]["cube"], ranks["1_1"]["cube"]), 1), TENSORS["cube"])
    assert ranks["0_1"].keys() == {"rows", "empty"}
    assert ranks["1_1"].keys() == {"columns", "cube"}
    layout = json.loads((sharded / LAYOUT).read_text())
    assert (layout["version"], layout["tp"], layout["pp"]) == (1, 2, 2)
    entry = layout["tensors"]["columns"]
    assert {key: entry[key] for key in ("shape", "dtype", "stage", "axis")} == {
        "shape": [3, 4], "dtype": "bfloat16", "stage": 1, "axis": 1,
    }  # fmt: skip
    assert [(piece["ranks"], piece["file"]) for piece in entry["pieces"]] == [
        ([0], "rank_1_0.safetensors"),
        ([1], "rank_1_1.safetensors"),
    ]
    assert [piece["ranks"] for piece in layout["tensors"]["whole"]["pieces"]] == [[0, 1]]
    assert len((sharded / LAYOUT).read_text().splitlines()) == len(TENSORS) + 2  # a tensor is a line


def test_the_library_reads_mixed_types_of_one_file(source: SafetensorsFile, tmp_path: Path) -> None:
    write_huggingface([source], tmp_path, 10**9, nothing)
    assert_same(load_file(tmp_path / "model.safetensors"), TENSORS)
    header_size = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "model.safetensors").read_bytes()[8 : 8 + header_size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header_size % 8 == 0
    for name, entry in header.items():  # each begins where its type may
        assert entry["data_offsets"][0] % TENSORS[name].dtype.itemsize == 0


def layout_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / LAYOUT).read_text())
    return values


Change = Callable[[dict[str, Any]], Any]


def rows(**values: Any) -> Change:
    return lambda layout: layout["tensors"]["rows"].update(values)


def second_piece(file: object) -> Change:
    return lambda layout: layout["tensors"]["rows"]["pieces"][1].update(file=file)


BAD: list[tuple[Change, str]] = [
    (lambda layout: layout.update(version=2), r"layout\.json: version=2 is not supported: only 1"),
    (lambda layout: layout.pop("tp"), r"layout\.json: tp is missing"),
    (lambda layout: layout.update(tp=0), r"tp=0 is not a number above 0"),
    (lambda layout: layout.update(tp=3), r"pieces are not one for each of tp=3 ranks in a file of its own"),
    (lambda layout: layout.update(tp=2**30), r"pieces are not one for each of tp=1073741824 ranks"),
    (lambda layout: layout.update(tensors=[]), r"tensors=\[\] is not of type dict"),
    (lambda layout: layout["tensors"].update(rows=3), r"layout\.json: rows is not an object"),
    (lambda layout: layout["tensors"].pop("rows"), r"rank_0_0.safetensors holds rows, which layout\.json does not list there"),
    (lambda layout: layout["tensors"]["rows"]["pieces"].reverse(), r"rows: its pieces are not one for each"),
    (rows(shape=[4, -3]), r"rows: shape=\[4, -3\] is not a list of sizes"),
    (rows(shape=[8, 3]), r"has torch.float32 \[2, 3\] as rows, but layout\.json says torch.float32 \[4, 3\]"),
    (rows(shape=[5, 3]), r"axis 0 of shape \[5, 3\] is not divided by tp=2"),
    (rows(axis=2), r"rows: axis=2 is not an axis of shape \[4, 3\], or null"),
    (rows(axis=True), r"rows: axis=True is not an axis"),
    (rows(axis=None), r"rows: its pieces are not one for each of tp=2 ranks"),
    (rows(dtype="int8"), r"but layout\.json says torch.int8"),
    (rows(dtype=8), r"rows: dtype=8 is not of type str"),
    (rows(pieces={}), r"rows: pieces is not a list of objects"),
    (rows(pieces=[]), r"rows: its pieces are not one for each"),
    (second_piece("rank_0_0.safetensors"), r"in a file of its own"),
    (second_piece("rank_1_1.safetensors"), r"rank_1_1.safetensors has nothing as rows"),
    (second_piece("../x"), r"file='../x' is not a file of its own folder"),
    (second_piece(7), r"file=7 is not a file of its own folder"),
    (second_piece("rank_9_9.safetensors"), r"names rank_9_9.safetensors, which is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_wrong_layout_is_named(sharded: Path, tmp_path: Path, change: Change, message: str) -> None:
    shutil.copytree(sharded, tmp_path / "bad")
    layout = layout_of(sharded)
    change(layout)
    (tmp_path / "bad" / LAYOUT).write_text(json.dumps(layout))
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path / "bad", allow_pickle=False).open_weights({})


def test_a_truncated_rank_is_named(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "bad")
    rank = tmp_path / "bad" / "rank_1_0.safetensors"
    rank.write_bytes(rank.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"rank_1_0.safetensors is truncated or not a safetensors file"):
        open_checkpoint(tmp_path / "bad", allow_pickle=False).open_weights({})


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([LAYOUT, LAYOUT, "rank_0_0.safetensors", "rank_1_1.safetensors"]), mutations=MUTATIONS)
def test_damage_is_a_user_error(
    sharded: Path, tmp_path: Path, name: str, mutations: list[tuple[str, float, int]]
) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in sharded.iterdir():
        (folder / file.name).symlink_to(file)
    content = (sharded / name).read_bytes()
    head = len(content) if name == LAYOUT else 8 + int.from_bytes(content[:8], "little")
    (folder / name).unlink()
    (folder / name).write_bytes(mutated(content, mutations, head))
    message = ""
    try:
        for opened in open_checkpoint(folder, allow_pickle=False).open_weights({}):
            assert sum(tensor.nbytes for _, tensor in opened.read(opened.shapes)) < 10**6
    except UserError as error:
        message = str(error)
    assert "\n" not in message

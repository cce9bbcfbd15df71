"""The sharded layout: the safetensors library reads the written files, and each fault of a folder is one UserError."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
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
from models.formats.sharded import LAYOUT, ShardedFile
from models.formats.sharded_writer import RankShards, write_sharded
from models.sharding import ParallelLayout, Shard
from tests.helpers.cases import each
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
    "shared": torch.randn(2, 3),
}
FIRST, LAST = ("whole", "rows", "empty", "mask", "bytes", "numbers", "shared"), ("columns", "cube", "scalar", "shared")
CUTS: dict[str, list[Shard | None]] = {  # for two ranks: equal, unequal, in two ranges, overlapping, identical
    "rows": [Shard(0, (range(3),)), Shard(0, (range(3, 4),))],
    "columns": [Shard(1, (range(2),)), Shard(1, (range(2, 4),))],
    "cube": [Shard(1, (range(1), range(3, 5))), Shard(1, (range(1, 3), range(5, 6)))],
    "numbers": [Shard(1, (range(2),)), Shard(1, (range(1, 3),))],
    "empty": [Shard(0, (range(0),)), Shard(0, (range(0),))],
    "shared": [Shard(0, (range(2),)), Shard(0, (range(2),))],
}
SHARES: RankShards = [
    [{name: CUTS.get(name, [None] * 2)[rank] for name in names} for rank in range(2)] for names in (FIRST, LAST)
]


def nothing(done: int, total: int) -> None:
    pass


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsFile:
    save_file(TENSORS, tmp_path / "source.safetensors")
    return SafetensorsFile(tmp_path / "source.safetensors")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_file(TENSORS, folder / "source")
    write_sharded([SafetensorsFile(folder / "source")], folder, SHARES, nothing)
    (folder / "source").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_every_type_and_shape_comes_back(source: SafetensorsFile, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    sha256 = write_sharded([source], tmp_path, SHARES, lambda done, total: progress.append((done, total)))
    assert sorted(sha256) == [
        "rank_0_0.safetensors",
        "rank_0_1.safetensors",
        "rank_1_0.safetensors",
        "rank_1_1.safetensors",
    ]
    total = sum(tensor.nbytes for tensor in TENSORS.values()) + TENSORS["shared"].nbytes  # both stages have it
    assert [total for _, total in progress] == [total] * (len(TENSORS) + 1)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1][0] == total
    file = ShardedFile(tmp_path)
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert file.dtypes == {name: tensor.dtype for name, tensor in TENSORS.items()}
    assert_same(dict(file.read(TENSORS)), TENSORS)


def test_a_rank_has_all_that_it_reads_as_the_library_reads_it(sharded: Path) -> None:
    for stage, ranks in enumerate(SHARES):
        for rank, share in enumerate(ranks):
            tensors = load_file(sharded / f"rank_{stage}_{rank}.safetensors")
            assert tensors.keys() == share.keys()
            for name, shard in share.items():
                tensor = TENSORS[name]
                wanted = [i for indices in shard.ranges for i in indices] if shard else None
                index = torch.tensor(wanted or [], dtype=torch.int64)
                assert torch.equal(tensors[name], tensor.index_select(shard.axis, index) if shard else tensor), name


def test_the_index_says_where_pieces_are(sharded: Path) -> None:
    layout = json.loads((sharded / LAYOUT).read_text())
    assert (layout["version"], layout["tp"], layout["pp"]) == (2, 2, 2)
    entry = layout["tensors"]["cube"]
    assert {key: entry[key] for key in ("shape", "dtype", "axis")} == {
        "shape": [2, 6, 3],
        "dtype": "float64",
        "axis": 1,
    }
    assert [(piece["ranges"], piece["files"]) for piece in entry["pieces"]] == [
        ([[0, 1], [3, 5]], ["rank_1_0.safetensors"]),
        ([[1, 3], [5, 6]], ["rank_1_1.safetensors"]),
    ]
    assert [(piece["ranges"], piece["files"]) for piece in layout["tensors"]["whole"]["pieces"]] == [
        (None, ["rank_0_0.safetensors", "rank_0_1.safetensors"])
    ]
    assert [(piece["ranges"], len(piece["files"])) for piece in layout["tensors"]["shared"]["pieces"]] == [
        ([[0, 2]], 4)
    ]
    content = TENSORS["whole"].numpy().tobytes()
    assert layout["tensors"]["whole"]["pieces"][0]["sha256"] == hashlib.sha256(content).hexdigest()
    assert len((sharded / LAYOUT).read_text().splitlines()) == len(TENSORS) + 2  # one line per tensor


def test_the_index_has_the_digest_of_each_piece(sharded: Path) -> None:
    """Equal to `sha256sum` of the piece's bytes in a file."""
    num_cut = 0
    for name, entry in json.loads((sharded / LAYOUT).read_text())["tensors"].items():
        for piece in entry["pieces"]:
            num_cut += piece["ranges"] is not None
            for file in piece["files"]:
                held = load_file(sharded / file)[name].contiguous().reshape(-1).view(torch.uint8)
                assert piece["sha256"] == hashlib.sha256(held.numpy().tobytes()).hexdigest(), (name, file)
    assert num_cut == 10  # "rows", "columns", "cube" and "numbers" in two, "empty" and "shared" in one


@each(
    "parallel_layout",
    [ParallelLayout(), ParallelLayout(2, 2, 1, 0), ParallelLayout(2, 2, 0, 1), ParallelLayout(4, 1, 3)],
)
def test_any_ranges_are_read(sharded: Path, parallel_layout: ParallelLayout) -> None:
    """Along the sharded axis or another one, of one piece or several."""
    file = ShardedFile(sharded).of_rank(parallel_layout)
    for name, tensor in TENSORS.items():
        for axis, size in enumerate(tensor.shape):
            for ranges in (
                (range(size),),
                (range(size // 2, size), range(size // 3)),
                (range(size - 1, size),) * bool(size),
            ):
                index = torch.tensor([i for indices in ranges for i in indices], dtype=torch.int64)
                assert torch.equal(file.read_ranges(name, Shard(axis, ranges)), tensor.index_select(axis, index)), name


@each("stage, rank", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_rank_of_the_same_division_reads_its_own_file_alone(
    sharded: Path, stage: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, opened, read = ShardedFile(sharded).of_rank(ParallelLayout(2, 2, rank, stage)), [], SafetensorsFile.read

    def watched(self: SafetensorsFile, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        opened.append(self.path.name)
        return read(self, names)

    monkeypatch.setattr(SafetensorsFile, "read", watched)
    for name, shard in SHARES[stage][rank].items():
        assert torch.is_tensor(file.read_ranges(name, shard) if shard else next(file.read([name]))[1])
    assert {*opened} == {f"rank_{stage}_{rank}.safetensors"}


def write_version_1(folder: Path) -> Path:
    """Write a matrix in equal pieces along each axis, and a tensor that one file has for both ranks, as version 1
    did."""
    tensors = {name: TENSORS[name] for name in ("columns", "whole", "scalar")} | {"rows": TENSORS["rows"]}
    axes = {"rows": 0, "columns": 1}
    entries = {}
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in tensors.items():
        parts = tensor.chunk(2, axes[name]) if name in axes else [tensor]
        for file, part in zip(files, parts, strict=False):
            file[name] = part.contiguous()
        pieces = [
            {"ranks": [i] if name in axes else [0, 1], "file": f"rank_0_{i}.safetensors"} for i in range(len(parts))
        ]
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"shape": [*tensor.shape], "dtype": dtype, "stage": 0, "axis": axes.get(name), "pieces": pieces}
    for i, file in enumerate(files):
        save_file(file, folder / f"rank_0_{i}.safetensors")
    (folder / LAYOUT).write_text(json.dumps({"version": 1, "tp": 2, "pp": 1, "tensors": entries}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_version_1_is_read(tmp_path: Path) -> None:
    file = ShardedFile(write_version_1(tmp_path))
    names = ("columns", "rows", "whole", "scalar")
    assert_same(dict(file.read(names)), {name: TENSORS[name] for name in names})
    rows = file.of_rank(ParallelLayout(2, 1, 1)).read_ranges("columns", Shard(0, (range(2, 3), range(1))))
    assert torch.equal(rows, TENSORS["columns"][[2, 0]])


def test_the_library_reads_mixed_types_of_one_file(source: SafetensorsFile, tmp_path: Path) -> None:
    write_huggingface([source], tmp_path, 10**9, nothing)
    assert_same(load_file(tmp_path / "model.safetensors"), TENSORS)
    header_size = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "model.safetensors").read_bytes()[8 : 8 + header_size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header_size % 8 == 0
    for name, entry in header.items():  # each begins at its type's alignment
        assert entry["data_offsets"][0] % TENSORS[name].dtype.itemsize == 0


def layout_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / LAYOUT).read_text())
    return values


Change = Callable[[dict[str, Any]], Any]


def rows(**values: Any) -> Change:
    return lambda layout: layout["tensors"]["rows"].update(values)


def piece(number: int, **values: Any) -> Change:
    return lambda layout: layout["tensors"]["rows"]["pieces"][number].update(values)


def shared_files(layout: dict[str, Any]) -> list[str]:
    files: list[str] = layout["tensors"]["shared"]["pieces"][0]["files"]
    return files


BAD: list[tuple[Change, str]] = [
    (lambda layout: layout.update(version=3), r"layout\.json: version=3 is not supported: only 1, 2"),
    (lambda layout: layout.pop("tp"), r"layout\.json: tp is missing"),
    (lambda layout: layout.update(tp=0), r"tp=0 is not a number above 0"),
    (lambda layout: layout.update(tensors=[]), r"tensors=\[\] is not of type dict"),
    (lambda layout: layout["tensors"].update(rows=3), r"layout\.json: rows is not an object"),
    (lambda layout: layout["tensors"].pop("rows"), r"rank_0_0.safetensors holds rows, which layout\.json does not list for this file"),
    (lambda layout: shared_files(layout).remove("rank_1_0.safetensors"), r"rank_1_0.safetensors holds shared, which layout\.json"),
    (rows(shape=[4, -3]), r"rows: shape=\[4, -3\] is not a list of sizes"),
    (rows(shape=[8, 3]), r"rows: no piece has index 4 of 8"),
    (rows(shape=[4, 8]), r"has torch.float32 \[3, 3\] as rows, but layout\.json says torch.float32 \[3, 8\]"),
    (rows(axis=2), r"rows: axis=2 is not an axis of shape \[4, 3\], or null"),
    (rows(axis=True), r"rows: axis=True is not an axis"),
    (rows(axis=None), r"rows: ranges=\[\[0, 3\]\], but the tensor has no axis: expected null"),
    (rows(dtype="int8"), r"but layout\.json says torch.int8"),
    (rows(dtype=8), r"rows: dtype=8 is not of type str"),
    (rows(pieces={}), r"rows: pieces is not a list of objects"),
    (rows(pieces=[]), r"rows: no piece has index 0 of 4"),
    (lambda layout: layout["tensors"]["whole"].update(pieces=[]), r"whole: 0 pieces, but the tensor has no axis: expected 1"),
    (lambda layout: layout["tensors"]["rows"]["pieces"].pop(0), r"rows: no piece has index 0 of 4"),
    (piece(0, ranges=[[0, 2]]), r"rows: no piece has index 2 of 4"),
    (piece(1, ranges=[[2, 4]]), r"has torch.float32 \[1, 3\] as rows, but layout\.json says torch.float32 \[2, 3\]"),
    (piece(1, ranges=[[3, 5]]), r"rows: ranges=\[\[3, 5\]\] is not a list of \[start, stop\] within 4"),
    (piece(1, ranges=[[4, 3]]), r"is not a list of \[start, stop\] within 4"),
    (piece(1, ranges=[[True, 4]]), r"is not a list of \[start, stop\] within 4"),
    (piece(1, ranges=None), r"ranges=None is not a list of \[start, stop\] within 4"),
    (piece(1, files=[]), r"rows: files=\[\] is not a list of the files that have the piece"),
    (piece(1, files=[7]), r"rows: files=\[7\] is not a list of the files"),
    (piece(1, files=["rank_1_1.safetensors"]), r"rank_1_1.safetensors has nothing as rows"),
    (piece(1, files=["../x"]), r"file='../x' is not a file of its own folder"),
    (piece(1, files=["rank_9_9.safetensors"]), r"names rank_9_9.safetensors, which is missing"),
]  # fmt: skip
BAD_1: list[tuple[Change, str]] = [
    (lambda layout: layout.update(tp=3), r"expected one piece for each of tp=3 ranks, each in its own file"),
    (lambda layout: layout.update(tp=2**30), r"expected one piece for each of tp=1073741824 ranks"),
    (lambda layout: layout["tensors"]["rows"]["pieces"].reverse(), r"rows: expected one piece for each"),
    (rows(shape=[5, 3]), r"rows: the axis of size 5 is not a multiple of tp=2"),
    (rows(shape=[8, 3]), r"has torch.float32 \[2, 3\] as rows, but layout\.json says torch.float32 \[4, 3\]"),
    (rows(axis=None), r"rows: expected one piece for each of tp=2 ranks"),
    (rows(pieces=[]), r"rows: expected one piece for each"),
    (piece(1, file="rank_0_0.safetensors"), r"each in its own file"),
    (piece(1, file=7), r"file=7 is not a file of its own folder"),
    (piece(1, file="../x"), r"file='../x' is not a file of its own folder"),
]


@each("change, message", BAD_1)
def test_a_wrong_layout_of_version_1_is_named(tmp_path: Path, change: Change, message: str) -> None:
    layout = layout_of(write_version_1(tmp_path))
    change(layout)
    (tmp_path / LAYOUT).write_text(json.dumps(layout))
    with pytest.raises(UserError, match=message):
        ShardedFile(tmp_path)


@each("change, message", BAD)
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


@pytest.mark.long
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

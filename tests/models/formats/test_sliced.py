"""A rank's files: their tensors, the bytes that they read, and the memory that they use."""

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.collectives import Threads
from models.formats.huggingface import PickleFile, SafetensorsFile
from models.formats.sliced import SlicedFile
from models.sharding import ParallelLayout, Shard
from tests.helpers.builders import run_config, write_llama
from tests.helpers.catalog import link
from tests.helpers.divided import plan_of, rank_plan

TENSORS = {
    "rows": torch.randn(9, 4),
    "columns": torch.randn(4, 9).bfloat16(),
    "codes": torch.randn(9, 5).to(torch.float8_e4m3fn),
}
TENSORS |= {"whole": torch.randn(3), "unknown": torch.randn(7)}
CUTS = {
    "rows": Shard(0, (range(2, 5),)),
    "columns": Shard(1, (range(3), range(6, 8))),
    "codes": Shard(0, (range(1), range(8, 9))),
}
NEEDED = ["rows", "columns", "codes", "whole"]
PARTS = {
    "rows": TENSORS["rows"][2:5],
    "columns": TENSORS["columns"][:, [0, 1, 2, 6, 7]],
    "codes": TENSORS["codes"].float()[[0, 8]].to(torch.float8_e4m3fn),
    "whole": TENSORS["whole"],
}


class Watched:
    """A file of whole tensors that are not views of it. Counts the tensors that are alive at the next read."""

    path, is_mapped = Path("watched"), False

    def __init__(self) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in TENSORS.items()}
        self.most_alive = 0
        self._read: list[weakref.ref[Tensor]] = []

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = TENSORS[name].clone()
            self._read.append(weakref.ref(tensor))
            self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self._read))
            yield name, tensor
            del tensor


def assert_has_the_parts(file: SlicedFile) -> None:
    assert file.shapes == {name: tuple(part.shape) for name, part in PARTS.items()}
    assert file.dtypes == {name: part.dtype for name, part in PARTS.items()}
    tensors = dict(file.read(NEEDED))
    for name, part in PARTS.items():
        assert tensors[name].dtype == part.dtype
        assert tensors[name].float().equal(part.float()), name
        if name in CUTS:  # it keeps nothing else in memory
            assert tensors[name].untyped_storage().nbytes() == part.numel() * part.itemsize


def test_of_safetensors_ranges_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_has_the_parts(SlicedFile(SafetensorsFile(tmp_path / "model.safetensors"), NEEDED, CUTS))


def test_of_other_files_the_part_of_a_whole_tensor(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "model.bin")
    assert_has_the_parts(SlicedFile(PickleFile(tmp_path / "model.bin"), NEEDED, CUTS))


def test_one_whole_tensor_at_a_time() -> None:
    file = Watched()
    for _, part in SlicedFile(file, NEEDED, CUTS).read(NEEDED):
        del part
    assert file.most_alive == 1


def test_the_ranks_read_each_byte_once_but_what_all_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two ranks share a key here. Only replicated tensors are read by every rank."""
    write_llama(tmp_path, num_key_value_heads=4, attention_bias=True)
    read, read_whole = 0, SafetensorsFile.read
    read_ranges = SafetensorsFile.read_ranges

    def counted(file: SafetensorsFile, name: str, shard: Shard) -> Tensor:
        nonlocal read
        part = read_ranges(file, name, shard)
        read += part.nbytes
        return part

    def uncut(file: SafetensorsFile, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_whole(file, names):
            assert "norm" in name
            yield name, tensor

    monkeypatch.setattr(SafetensorsFile, "read_ranges", counted)
    monkeypatch.setattr(SafetensorsFile, "read", uncut)
    run = run_config(tmp_path)
    for group in Threads.of(3):
        (file,) = rank_plan(run, ParallelLayout(3, 1, group.rank), group).files
        for _ in file.read(file.shapes):
            pass
    shapes = SafetensorsFile(tmp_path / "model.safetensors").shapes
    assert read == sum(4 * torch.Size(shape).numel() for name, shape in shapes.items() if "norm" not in name)


def test_names_that_lack_their_first_part(tmp_path: Path) -> None:
    """GPT-2's files name h.0 instead of transformer.h.0, and no second copy is held."""
    link("gpt2", tmp_path)
    run, groups = run_config(tmp_path), Threads.of(2)
    shapes = [rank_plan(run, ParallelLayout(2, 1, group.rank), group).files[0].shapes for group in groups]
    whole_shapes = plan_of(run).files[0].shapes
    name = next(name for name in whole_shapes if name.endswith("0.attn.c_attn.weight"))
    assert [rank_shapes[name] for rank_shapes in shapes] == [(whole_shapes[name][0], whole_shapes[name][1] // 2)] * 2

"""Files of compressed-tensors up to 0.14, which store weights without their zeros."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.errors import UserError
from models.formats.huggingface import open_huggingface
from tests.helpers.builders import all_logits, engine_of, write_llama
from tests.helpers.cases import each
from tests.helpers.conversion import convert, tensors_in

PROMPT = [1, *range(5, 50)]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


# Written by version 0.13 of the package from the weights below.
NUMBERS, FOURS = torch.arange(33).reshape(3, 11), torch.arange(24).reshape(2, 12)
UNSTRUCTURED = torch.where(NUMBERS * 7 % 5 < 2, NUMBERS - 16.0, 0.0).bfloat16()
TWO_OF_FOUR = torch.where((FOURS + FOURS // 4) % 4 < 2, (FOURS - 11) / 4, 0.0).to(torch.float8_e4m3fn)
VALUES = torch.tensor([-16.0, -13, -11, -8, -6, -3, -1, 2, 4, 7, 9, 12, 14]).bfloat16()
WRITTEN = {
    "matrix.shape": torch.tensor([3, 11]),
    "matrix.compressed": VALUES,
    "matrix.bitmask": ints(41, 5, 148, 2, 74, 1).reshape(3, 2),
    "matrix.row_offsets": torch.tensor([0, 5, 9]),
    "vector.shape": torch.tensor([11]),
    "vector.compressed": VALUES[5:9].clone(),
    "vector.bitmask": ints(148, 2),
    "vector.row_offsets": torch.tensor(0),
    "fours.shape": torch.tensor([[2], [12]]),
    "fours.compressed": torch.tensor([[-2.75, -2.5, -1.75, -1, -0.25, 0], [0.5, 0.75, 1.25, 1.5, 2.25, 3]]).to(
        torch.float8_e4m3fn
    ),
    "fours.bitmask": ints(147, 12, 54, 9).reshape(2, 2),
    "other.weight": torch.ones(2),
}


def written(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint in two files, so that the tensors of a module are in both."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    names = sorted(tensors, key=lambda name: (name.rpartition(".")[2], name))
    files = {name: f"model-{'bitmask' in name}.safetensors" for name in names}
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    files = open_huggingface(folder, allow_pickle=False).open_weights({})
    tensors = {name: tensor for file in files for name, tensor in file.read(file.shapes)}
    for file in files:
        for name in file.shapes:
            assert (tuple(tensors[name].shape), tensors[name].dtype) == (file.shapes[name], file.dtypes[name])
    return tensors


def test_the_packages_files_give_their_weights(tmp_path: Path) -> None:
    tensors = read(written(tmp_path / "model", WRITTEN))
    assert tensors.keys() == {"matrix.weight", "vector.weight", "fours.weight", "other.weight"}
    assert tensors["matrix.weight"].equal(UNSTRUCTURED)
    assert tensors["vector.weight"].equal(UNSTRUCTURED[1])
    assert tensors["fours.weight"].view(torch.uint8).equal(TWO_OF_FOUR.view(torch.uint8))


@each(
    ("change", "message"),
    [
        ({"matrix.weight": UNSTRUCTURED}, "has matrix.bitmask, but the checkpoint also has matrix.weight"),
        ({"matrix.compressed": None}, "has matrix.bitmask, but the checkpoint has no matrix.compressed"),
        ({"matrix.shape": None}, "has matrix.bitmask, but the checkpoint has no matrix.shape"),
        ({"matrix.compressed": VALUES[1:].clone()}, "matrix.bitmask has 13 bits set, but matrix.compressed has 12"),
        (
            {"matrix.shape": torch.tensor([3, 17])},
            r"matrix.bitmask \[3, 2\] does not fit matrix.shape=\[3, 17\]",
        ),
        ({"matrix.shape": torch.tensor([11, 3])}, r"matrix.bitmask \[3, 2\] does not fit matrix.shape=\[11, 3\]"),
        (
            {"matrix.shape": torch.empty(0, dtype=torch.int64)},
            r"matrix.bitmask \[3, 2\] does not fit matrix.shape=\[\]",
        ),
        ({"matrix.shape": torch.tensor([3.0, 11.0])}, "matrix.shape is torch.float32, expected torch.int64"),
        ({"matrix.bitmask": torch.zeros(3, 2)}, "matrix.bitmask is torch.float32, expected torch.uint8"),
    ],
)
def test_damaged_files_are_refused(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in (WRITTEN | change).items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        read(written(tmp_path / "model", tensors))


def test_a_model_without_its_zeros_is_the_model_with_them(tmp_path: Path) -> None:
    write_llama(tmp_path / "dense", intermediate_size=92)
    dense, masked = load_file(tmp_path / "dense" / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in dense.items():
        if name.endswith("proj.weight"):
            tensor[torch.rand(tensor.shape, generator=generator) < 0.6] = 0
            module, stored = name.removesuffix(".weight"), tensor != 0
            masked[f"{module}.bitmask"] = torch.from_numpy(np.packbits(stored.numpy(), axis=1, bitorder="little"))
            masked[f"{module}.compressed"] = tensor[stored]
            masked[f"{module}.shape"] = torch.tensor(tensor.shape)
            masked[f"{module}.row_offsets"] = stored.sum(1).cumsum(0) - stored.sum(1)
        else:
            masked[name] = tensor
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    sparsity = {"format": "sparse-bitmask", "sparsity_structure": "unstructured", "targets": ["Linear"], "ignore": []}
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "sparsity_config": sparsity,
        "version": "0.13.0",
    }
    folder = written(tmp_path / "masked", masked, config)
    expected = all_logits(engine_of(tmp_path / "dense"), PROMPT)
    assert all_logits(engine_of(folder), PROMPT).equal(expected)
    converted = convert(folder, tmp_path / "converted")
    kept = json.loads((converted / "config.json").read_text())["quantization_config"]["sparsity_config"]
    assert kept == sparsity | {"format": "dense"}
    assert all(tensor.equal(dense[name]) for name, tensor in tensors_in(converted).items())
    assert all_logits(engine_of(converted), PROMPT).equal(expected)

"""Pickles, `pytorch_model.bin`: refused without permission, and never executed."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.errors import UserError
from tests.helpers.cases import each
from tests.helpers.damage import RunsCode
from tests.helpers.huggingface_files import assert_same, load, make_tensors, write_config


def write_pickle(folder: Path, content: object) -> Path:
    torch.save(content, folder / "pytorch_model.bin")
    return write_config(folder)


def test_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*convert them to safetensors.*model\.allow_pickle=true"):
        load(write_pickle(tmp_path, make_tensors()))


def test_pickles_load_where_allowed(tmp_path: Path) -> None:
    tensors = make_tensors()
    assert_same(load(write_pickle(tmp_path, tensors), allow_pickle=True), tensors)


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    write_pickle(tmp_path, make_tensors() | {"code": RunsCode(trace)})
    with pytest.raises(UserError, match="holds more than tensors"):
        load(tmp_path, allow_pickle=True)
    assert not trace.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert trace.exists()  # the file is as dangerous as intended


@each(
    "content",
    [
        [torch.ones(2)],
        {"a": 3},
        {"a": torch.ones(2).to_sparse()},
        {3: torch.ones(2)},
    ],
)
def test_pickle_of_something_else(tmp_path: Path, content: object) -> None:
    with pytest.raises(UserError, match="does not hold a dictionary of dense tensors"):
        load(write_pickle(tmp_path, content), allow_pickle=True)


def with_pickle_bytes(content: bytes, pickled: bytes) -> bytes:
    """Return a torch.save file with another pickle in it."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(result, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return result.getvalue()


@each(
    "damage",
    [
        lambda content: content[:-200],
        lambda content: b"?" * 500,
        lambda content: b"",
        lambda content: with_pickle_bytes(content, b""),
        lambda content: with_pickle_bytes(content, b"\x80\x02X\x01\x00\x00\x00\xff."),
        lambda content: with_pickle_bytes(content, b"\x80\x02h\x07."),
    ],
)
def test_damaged_pickle(tmp_path: Path, damage: Any) -> None:
    file = write_pickle(tmp_path, make_tensors()) / "pytorch_model.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"pytorch_model\.bin is truncated, too old, or holds more than tensors"):
        load(tmp_path, allow_pickle=True)

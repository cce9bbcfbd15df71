"""From model.path to a folder: local folders, the hub's cache, one clear error where there is neither."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from conf.errors import UserError
from models.formats import open_checkpoint
from models.hub import find_checkpoint


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path), with_weights=True, allow_pickle=False) == tmp_path


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path) -> None:
    entry = tmp_path / "cache" / "models--org--name"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    (entry / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (entry / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    assert (find_checkpoint("org/name", with_weights=True, allow_pickle=False) / "config.json").is_file()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("org/name", "there is no folder org/name, and as a hub id it cannot be downloaded .*give model.path=FOLDER"),
        (
            "/nowhere/at/all",
            "there is no folder /nowhere/at/all: model.path must be a folder or a file .* or a hub id such as org/name",
        ),
        ("nowhere", "there is no folder nowhere"),
        ("../nowhere/model", "there is no folder ../nowhere/model"),
        ("a b/c", "there is no folder a b/c"),
    ],
)
def test_nothing_there_is_one_clear_error(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        find_checkpoint(path, with_weights=True, allow_pickle=False)
    assert "\n" not in str(raised.value)


def test_a_file_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    path = find_checkpoint(str(tmp_path / "model.onnx"), with_weights=True, allow_pickle=False)
    with pytest.raises(UserError, match="model.onnx is a file: model.path must be a folder"):
        open_checkpoint(path, allow_pickle=False)

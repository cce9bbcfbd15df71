"""manifest.json compared with hashlib, and every difference that a folder can have from it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.errors import UserError
from models.formats.manifest import MANIFEST, verify_manifest, write_manifest
from tests.helpers.cases import each

CONTENTS = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 9,
    "empty": b"",
    "1_Pooling/config.json": b"[1]",
}


def written(folder: Path) -> Path:
    (folder / "1_Pooling").mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, {})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


def test_every_file_is_listed_with_size_and_sha256(folder: Path) -> None:
    assert json.loads((folder / MANIFEST).read_text()) == {
        "files": {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(CONTENTS.items())
        }
    }
    (folder / ".DS_Store").write_text("hidden")
    verify_manifest(folder)
    verify_manifest(folder / "model.safetensors")  # if a single file is the model


def test_a_hash_that_is_known_is_not_computed_again(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    write_manifest(folder, {"empty": "known"})
    assert json.loads((folder / MANIFEST).read_text())["files"]["empty"] == {"size": 0, "sha256": "known"}


def rewrite(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)


def listed(name: str, entry: object) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, json.dumps({"files": {name: entry}}))


EMPTY = hashlib.sha256(b"").hexdigest()
BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / MANIFEST).unlink(), r"model\.verify=true, but .* has no manifest\.json: task=convert writes one"),
    (lambda folder: (folder / "config.json").unlink(), r"differs from its manifest\.json: config\.json is missing$"),
    (lambda folder: (folder / "empty").write_text("x"), "empty has 1 bytes, expected 0"),
    (lambda folder: (folder / "config.json").write_text("[]"),
     f"config.json has sha256 {hashlib.sha256(b'[]').hexdigest()}, expected '{hashlib.sha256(b'{}').hexdigest()}'"),
    (lambda folder: (folder / "model.bin").write_text("x"), r"model\.bin is not listed"),
    (lambda folder: (folder / "templates").mkdir(), r"templates is not listed"),
    (lambda folder: (folder / "1_Pooling" / "more").touch(), r"1_Pooling/more is not listed"),
    (lambda folder: (folder / "1_Pooling" / "config.json").unlink(), r"1_Pooling/config.json is missing"),
    (lambda folder: (folder / "1_Pooling" / "config.json").write_text("[2]"), r"1_Pooling/config.json has sha256"),
    (listed("1_Pooling/../../config.json", {}), r"config\.json' is not a valid entry"),
    (listed("/etc/passwd", {}), r"'/etc/passwd' is not a valid entry"),
    (lambda folder: [(folder / f"{i}").touch() for i in range(10)], r"0 is not listed; .* and 2 more$"),
    (lambda folder: rewrite(folder, "["), r"manifest\.json cannot be read"),
    (lambda folder: rewrite(folder, "[]"), r"manifest\.json holds a list, not a JSON object"),
    (lambda folder: rewrite(folder, "{}"), r"manifest\.json: files is missing"),
    (listed("../config.json", {}), r"'\.\./config\.json' is not a valid entry"),
    (listed("config.json", 5), r"'config\.json' is not a valid entry"),
    (listed("config.json", {}), r"config\.json has 2 bytes, expected None"),
    (listed("empty", {"size": 0, "sha256": [1]}), rf"empty has sha256 {EMPTY}, expected \[1\]"),
]  # fmt: skip


@each("damage, message", BAD)
def test_a_difference_from_the_manifest_is_named(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = written(tmp_path)
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        verify_manifest(folder)
    assert "\n" not in str(caught.value)

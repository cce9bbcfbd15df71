"""A hub's cache on disk, as huggingface_hub writes it."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants


def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client read only this cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def store_commit(id: str, commit: str, folder: Path | None = None, refs: tuple[str, ...] = ("main",)) -> Path:
    """Write a commit of a repository, with copies of the files of `folder`, and point the refs to it. Return its folder."""
    entry = Path(constants.HF_HUB_CACHE) / f"models--{id.replace('/', '--')}"
    snapshot = entry / "snapshots" / commit
    if folder is None:
        snapshot.mkdir(parents=True, exist_ok=True)
    else:
        shutil.copytree(folder, snapshot)
    for ref in refs:
        (entry / "refs").mkdir(exist_ok=True)
        (entry / "refs" / ref).write_text(commit)
    return snapshot

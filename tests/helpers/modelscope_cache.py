"""A stand-in for the package modelscope. It finds the content of its cache and sends no request."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import models.formats.hub

ENDPOINT = "https://modelscope.invalid"


def use_modelscope(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-in, with the cache layout of modelscope-hub 0.5, or of modelscope before 1.38, which has no
    revisions."""

    def snapshot_download(id: str, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert local_files_only
        assert "*.json" in allow_patterns
        places = [cache / id, cache / id.replace("/", "--") / "snapshots" / (revision or "master")]
        return str(next(place for place in places if place.is_dir()))

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.utils", "modelscope.hub.utils.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["modelscope"], "snapshot_download", snapshot_download, raising=False)
    monkeypatch.setattr(sys.modules["modelscope.hub.utils.utils"], "get_endpoint", lambda: ENDPOINT, raising=False)
    monkeypatch.setattr(models.formats.hub, "_unreachable", lambda asked: f"{asked} cannot be reached")

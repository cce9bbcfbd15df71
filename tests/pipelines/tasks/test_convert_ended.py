"""`task=convert` that ended in any way, or ran concurrently with another one: no partial output."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from models.formats.huggingface_writer import write_huggingface
from models.formats.manifest import verify_manifest
from models.formats.safetensors_writer import SafetensorsWriter
from pipelines.tasks import convert_formats
from tests.helpers.cases import each
from tests.helpers.conversion import SHARDED, contents, convert, environment, names, tensors_in
from tests.helpers.huggingface_files import assert_same, make_tensors, write_whole


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("source"), make_tensors())


@each("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@each(("place", "moment"), [("write", 4), ("fsync", 2), ("rename", 1), ("rename", 2)])
def test_a_failed_conversion_leaves_the_old_model_or_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str, moment: int
) -> None:
    convert(source, tmp_path / "made")
    before, calls = contents(tmp_path / "made"), []
    owner = SafetensorsWriter if place == "write" else os
    real = getattr(owner, place)

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == moment:
            raise error
        return real(*arguments)

    monkeypatch.setattr(owner, place, failing)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "made", overwrite=True, format=SHARDED, tp=2)
    assert contents(tmp_path / "made") == before
    calls.clear()
    if (place, moment) != ("rename", 2):  # only for overwriting
        with pytest.raises(type(error)):
            convert(source, tmp_path / "other", format=SHARDED, tp=2)
    assert names(tmp_path) == {"made", "made-run"}


# Kills a conversion at a given call with an uncatchable signal. Every one is a fork of a process that has only imported
# modules.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from conf.schema import ModelConfig, RunConfig, Task
from conf.tasks import CheckpointFormat, ConvertConfig
from models.formats.safetensors_writer import SafetensorsWriter
from pipelines.tasks.convert import run_convert
from tests.helpers.kill import before

source, base, moments = json.loads(sys.argv[1])


def convert_here(target, folder, **settings):
    settings = ConvertConfig(output=target, format=CheckpointFormat.sharded, tp=2, **settings)
    run_convert(RunConfig(Task.convert, ModelConfig(source), convert=settings), folder, lambda *_: "")


def convert(target, hook=None, **settings):
    child = os.fork()
    if child == 0:
        if hook:
            before({"write": SafetensorsWriter, "fsync": os, "rename": os}[hook[0]], *hook)
        convert_here(target, Path(base) / "run", **settings)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


sys.stdout, out = open(os.devnull, "w"), sys.stdout
convert_here(f"{base}/here", Path(f"{base}/here-run"))  # for all that this imports
seen = []
for i, moment in enumerate(moments):
    target = f"{base}/{i}"
    seen.append([convert(target, moment), os.path.exists(target), convert(target)])
seen.append([convert(target, ("write", 3), overwrite=True), os.path.exists(target), 0])
seen.append([convert(target, ("rename", 2), overwrite=True), os.path.exists(target), convert(target, overwrite=True)])
json.dump(seen, out)
"""


@pytest.mark.long
def test_killed_at_any_moment_it_leaves_nothing_under_the_name(source: Path, tmp_path: Path) -> None:
    moments = [("write", 1), ("write", 2), ("write", 9), ("fsync", 1), ("fsync", 3), ("rename", 1)]
    arguments = json.dumps([str(source), str(tmp_path), moments])
    command = [sys.executable, "-c", DRIVER, arguments]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True)
    *killed, while_writing, between_renames = json.loads(done.stdout)
    assert killed == [[-9, False, 0]] * len(moments)  # the next one completes it
    assert while_writing == [-9, True, 0]  # the old one
    assert between_renames == [-9, False, 0]
    for i in range(len(moments)):
        verify_manifest(tmp_path / f"{i}")
        assert_same(tensors_in(convert(tmp_path / f"{i}", tmp_path / f"hf{i}")), make_tensors())
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_two_conversions_to_one_target_do_not_mix(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = []

    def meanwhile(function: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*arguments: Any) -> Any:
            monkeypatch.undo()
            with pytest.raises(UserError) as caught:
                convert(source, tmp_path / "made")
            messages.append(str(caught.value))
            return function(*arguments)

        return hooked

    monkeypatch.setattr(convert_formats, "write_huggingface", meanwhile(write_huggingface))
    convert(source, tmp_path / "made")
    assert messages == [f"another run writes convert.output={tmp_path / 'made'}: wait for it, or give another folder"]
    verify_manifest(tmp_path / "made")

"""Stages compute steps of different rows at once."""

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conf.decoding import DecodeConfig
from conf.schema import ParallelConfig, ParallelMode
from kernels import build
from pipelines.loading import load_engine
from pipelines.ranks import launch
from tests.helpers.builders import run_config, write_llama
from tests.helpers.meeting_worker import NUM_MEETINGS, TIMEOUT_S, Meetings, meet, record_nothing

pytestmark = pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")


def test_both_stages_are_busy_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the second stage lasts until the first is within the step after it: stages that wait for each other never get there."""
    write_llama(tmp_path / "model")
    run = run_config(tmp_path / "model")
    divided = replace(run, parallel=ParallelConfig(ParallelMode.pp, pp=2))
    monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-P", "-m", "tests.helpers.meeting_worker"))
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    record_nothing(monkeypatch)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "meeting"))
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        engine = load_engine(divided, 2)
        stream, _ = listener.accept()
    with stream:
        meetings = Meetings(stream, skipped=1)
        meet(monkeypatch, meetings)
        decode = DecodeConfig(max_new_tokens=12)
        outputs = list(engine.generate([engine.request(i, [1, 5 + i], decode) for i in range(2)]))
        engine.runner.leader.close()  # type: ignore[attr-defined]
        second = json.loads(b"".join(iter(lambda: stream.recv(1 << 16), b"")))
    assert [len(output.completions[0].token_ids) for output in outputs] == [12, 12]
    first = meetings.intervals[1 : 1 + NUM_MEETINGS]
    assert len(first) == len(second) == NUM_MEETINGS
    assert all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(first, second, strict=True))

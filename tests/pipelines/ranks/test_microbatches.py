"""Stages compute steps of different rows at the same time."""

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conf.decoding import DecodeConfig
from conf.schema import ParallelConfig, ParallelMode
from kernels import build
from pipelines.engine.operations import Execute
from pipelines.engine.steps import StepOutputs
from pipelines.loading.load_engine import load_engine
from pipelines.ranks import launch
from tests.helpers.builders import engine_of, generate, run_config, write_llama
from tests.helpers.meeting_worker import NUM_MEETINGS, TIMEOUT_S, Meetings, meet, record_nothing
from tests.helpers.oracle import random_prompts

pytestmark = pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")


@pytest.mark.long
def test_both_stages_are_busy_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the second stage lasts until the first stage is within its next step. Stages that wait for each
    other never reach this."""
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
        engine.executor.driver.close()  # type: ignore[attr-defined]
        second = json.loads(b"".join(iter(lambda: stream.recv(1 << 16), b"")))
    assert [len(output.completions[0].token_ids) for output in outputs] == [12, 12]
    first = meetings.intervals[1 : 1 + NUM_MEETINGS]
    assert len(first) == len(second) == NUM_MEETINGS
    assert all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_prompts_of_microbatches_are_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Therefore a stage begins before another one has computed a full step."""
    write_llama(tmp_path)
    engine = engine_of(tmp_path, max_batched_tokens=64)
    prompts = random_prompts(96, (40, 9, 21))
    expected = generate(engine, prompts, DecodeConfig(max_new_tokens=6))
    parts, execute = list[int](), engine.executor.execute

    def begin(operation: Execute) -> Callable[[], StepOutputs]:
        parts.append(operation.batch.shape.num_tokens)
        outputs = execute(operation.batch)
        kept = StepOutputs(*(tensor.clone() for tensor in outputs))
        return lambda: kept

    monkeypatch.setattr(engine.executor, "num_microbatches", 2)
    monkeypatch.setattr(engine.executor, "begin", begin)
    outputs = generate(engine, prompts, DecodeConfig(max_new_tokens=6, prefix_cache=False))
    assert [output.completions[0].token_ids for output in outputs] == [
        output.completions[0].token_ids for output in expected
    ]
    assert max(parts) == 8  # of 64 tokens, in four steps of each of two microbatches

"""Frames cross a socket in any pieces, typed. All other data is rejected."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import UserError
from conf.quantization import QuantScheme
from conf.schema import DeviceType, RunConfig, Task
from conf.serving import ServeConfig
from conf.tasks import PredictConfig
from pipelines.replicas.engine_process import frames
from pipelines.replicas.engine_process.frames import (
    MAX_FRAME_BYTES,
    Cancel,
    Delta,
    Deltas,
    FrameReader,
    FromEngine,
    LoadAdapter,
    Logprob,
    Start,
    Submit,
    ToEngine,
    UnloadAdapter,
    encode,
)
from tests.helpers.builders import run_config
from tests.helpers.cases import each

SENT = [
    Submit(1, [5, 6], {"temperature": 0.5, "stop": ["\n"], "logit_bias": {7: -1.0}}, adapter="fr", streams=True),
    Cancel(1),
    Submit(2**40, [0], {}, prefix="story"),
    LoadAdapter(3, "fr#1", "/adapters/fr", ["/adapters"], True, "ab"),
    UnloadAdapter(4, "fr#1"),
]


@given(st.lists(st.integers(1, 40)))
def test_frames_come_whole_out_of_any_pieces(shards: list[int]) -> None:
    content, read, reader = b"".join(map(encode, SENT)), [], FrameReader(ToEngine)
    for cut in shards:
        read += reader.read(content[:cut])
        content = content[cut:]
    assert read + list(reader.read(content)) == SENT


def test_a_run_arrives_as_it_was(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    run.quant.scheme, run.device.type = QuantScheme.int4, DeviceType.cpu
    run.model.adapters = {"fr": "/adapters/fr"}
    run.task, run.predict, run.serve = Task.serve, PredictConfig(), ServeConfig(batch_size=3, api_keys="/keys")
    (start,) = FrameReader(ToEngine).read(encode(Start(run)))
    assert isinstance(start.run, RunConfig)
    assert start.run == run


def test_a_frame_of_the_engine_arrives_unchanged() -> None:
    said = Deltas(
        [Delta(1, 0, "é", [3], [Logprob(3, -0.5, 1, [(3, -0.5), (4, -1.5)])], "stop", 3), Delta(2, 1, "", [], [])]
    )
    assert list(FrameReader(FromEngine).read(encode(said))) == [said]


@each(
    ("content", "message"),
    [
        (msgspec.msgpack.encode({"type": "Submit", "id": "x"}), "a frame cannot be read: .*id"),
        (msgspec.msgpack.encode({"type": "Run", "code": "x"}), "a frame cannot be read: Invalid value 'Run'"),
        (msgspec.msgpack.encode({"type": "Deltas", "deltas": []}), "a frame cannot be read: Invalid value 'Deltas'"),
        (b"\xc1", "a frame cannot be read"),
    ],
)
def test_invalid_frames_to_the_engine_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(FrameReader(ToEngine).read(len(content).to_bytes(4, "big") + content))


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(UserError, match=f"longer than {MAX_FRAME_BYTES}"):
        list(FrameReader(ToEngine).read((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def test_every_frame_says_what_it_is() -> None:
    kinds = [*frames.ToEngine.__args__, *frames.FromEngine.__args__]
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)

"""Replicas of two ranks each share the rows of a job, on a real Ray: the files are those of one process, also if a rank
is killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.schema import ParallelConfig, ParallelMode
from conf.tasks import PredictConfig
from kernels import build
from pipelines.jobs.journal import Journal
from pipelines.replicas.cluster import _ray
from pipelines.tasks.predict import run_predict
from tests.helpers.processes import ours, row_workers
from tests.helpers.rank_runs import RESULTS, are_gone, write_prompts
from tests.helpers.serving import tiny_run
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"),
    pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels"),
    pytest.mark.long,
]


@pytest.fixture(autouse=True, scope="module")
def four_processors() -> Iterator[None]:
    """Start a Ray that counts four processors, which two replicas of two ranks need, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with _ray("parallel=ray"):
            import ray
        ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, logging_level="warning")
        yield
        ray.shutdown()


def ranks() -> list[int]:
    """Return the processes of ranks 1 of our replicas."""
    workers = row_workers()
    return [pid for pid, (parent, command) in ours().items() if "loading.worker" in command and parent in workers]


@pytest.mark.parametrize("degrees", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.matrix)], ids=["tp", "pp"])
def test_the_files_match_one_process(
    degrees: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_prompts(tmp_path / "rows.txt")
    decode, predict = DecodeConfig(temperature=0.9, seed=5, max_new_tokens=40), PredictConfig(str(data), batch_size=2)
    alone = replace(tiny_run(), decode=decode, predict=predict)
    run_predict(alone, tmp_path / "alone", dump)
    append, seen = Journal.append, list[int]()

    def killing(journal: Journal, record: dict[str, object]) -> None:
        append(journal, record)
        if journal.num_rows == 4:
            seen.extend(ranks())
            os.kill(seen[0], signal.SIGKILL)

    monkeypatch.setattr(Journal, "append", killing)
    parallel = ParallelConfig(ParallelMode.ray, 2, **degrees)
    run_predict(replace(alone, parallel=parallel), tmp_path / "divided", dump)
    for name in RESULTS:
        assert (tmp_path / "divided" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert len(seen) == 2
    assert any("is lost and restarted" in message for message in caplog.messages)
    until(lambda: are_gone(seen) and not ranks())

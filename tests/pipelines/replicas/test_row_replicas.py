"""Jobs whose rows replicas share, on a real Ray: the files are those of one process, whichever process is killed."""

import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import ParallelConfig, ParallelMode, RunConfig, Task
from conf.tasks import PredictConfig
from pipelines.jobs.journal import Journal
from pipelines.jobs.prompts import PromptRow
from pipelines.replicas.cluster import rows_on_ray
from pipelines.tasks.embed import run_embed
from pipelines.tasks.predict import run_predict
from tests.helpers.faulty_rows import POISON, PoisonRows, UnequalRows, UnloadableRows
from tests.helpers.processes import row_workers
from tests.helpers.serving import tiny_run
from tests.helpers.waiting import LIMIT_S

pytestmark = [pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"), pytest.mark.long]

RESULTS = ("predictions.jsonl", "text_generation_result.txt")
WORDS = "Once upon a time there was a dog who saw the big red sun and ran to its tree".split()


@pytest.fixture(autouse=True, scope="module")
def one_ray() -> Iterator[None]:
    """All tests share a Ray, which a process starts once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
        import ray

        ray.shutdown()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """200 rows of several lengths: greedy ones, seeded ones, and two with errors."""
    rows: list[dict[str, Any]] = []
    for i in range(200):
        prompt = " ".join(WORDS[(i * 7 + 5 * j) % len(WORDS)] for j in range(1 + i % 9))
        decode = {"temperature": 0.9, "seed": i} if i % 3 == 0 else {"temperature": 0.8} if i % 3 == 1 else {}
        rows.append({"id": i, "prompt": prompt, "decode": decode | {"max_new_tokens": 2 + i % 7}})
    rows[50], rows[51] = {"id": 50}, {"prompt": "half \ud800 of a pair"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_of(data: Path | None = None, replicas: int = 2, batch_size: int = 4) -> RunConfig:
    predict = PredictConfig(data=None if data is None else str(data), batch_size=batch_size)
    decode = DecodeConfig(seed=5)
    return replace(tiny_run(), predict=predict, decode=decode, parallel=ParallelConfig(ParallelMode.ray, replicas))


def all_end() -> bool:
    """Return whether the workers end, which Ray does not wait for."""
    for pid in row_workers():
        with suppress(ProcessLookupError):  # the process has ended meanwhile
            process = os.pidfd_open(pid)
            if not select.select([process], [], [], LIMIT_S)[0]:
                return False
            os.close(process)
    return True


def written(monkeypatch: pytest.MonkeyPatch, at: int, then: Callable[[], None]) -> list[int]:
    """Return the indices of later rows of the journal. `then` is called after `at` rows."""
    append, indices = Journal.append, list[int]()

    def hooked(journal: Journal, record: dict[str, Any]) -> None:
        append(journal, record)
        indices.append(record["row"]["index"])
        if len(indices) == at:
            then()

    monkeypatch.setattr(Journal, "append", hooked)
    return indices


def test_one_of_two_is_killed_and_the_files_match_one_process(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(data)
    run_predict(replace(run, parallel=ParallelConfig()), tmp_path / "single", dump)
    indices = written(monkeypatch, 60, lambda: os.kill(row_workers()[0], signal.SIGKILL))
    with caplog.at_level(logging.WARNING):
        run_predict(run, tmp_path / "ray", dump)
    assert sorted(indices) == list(range(200))
    for name in RESULTS:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "single" / name).read_bytes()
    assert [record.message for record in caplog.records if "is lost and restarted" in record.message]
    metrics, alone = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("ray", "single"))
    for name in ("num_prompts", "num_errors", "num_generated_tokens", "seed", "weight_bytes"):
        assert metrics[name] == alone[name], name
    assert all_end()
    assert not (tmp_path / "ray" / "journal.jsonl").exists()


def test_one_of_two_hangs_and_its_rows_are_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(data)
    run_predict(replace(run, parallel=ParallelConfig()), tmp_path / "single", dump)
    hung: list[tuple[int, float]] = []

    def stop() -> None:
        os.kill(row_workers()[0], signal.SIGSTOP)
        hung.append((os.pidfd_open(row_workers()[0]), time.monotonic()))

    written(monkeypatch, 60, stop)
    with caplog.at_level(logging.WARNING):
        run_predict(replace(run, parallel=ParallelConfig(ParallelMode.ray, 2, heartbeat_s=5.0)), tmp_path / "ray", dump)
    for name in RESULTS:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "single" / name).read_bytes()
    lost = [record.message for record in caplog.records if "is lost" in record.message]
    assert len(lost) == 1
    assert lost[0].endswith("is lost and restarted, and its rows run again: it has been silent for 5 s")
    ((process, _),) = hung
    assert select.select([process], [], [], LIMIT_S)[0]  # the process has ended
    os.close(process)


def test_replicas_of_a_machine_compute_on_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.replicas import row_replicas
    from pipelines.replicas.connection import connect
    from tests.helpers.separate_worker import RowWorker

    monkeypatch.setattr(row_replicas, "RowWorker", RowWorker)
    cpus, _ = connect()
    number = min(sum(cpus), len(os.sched_getaffinity(0)), 4)
    run = run_of(replicas=number)
    assert all_end()  # of other tests
    with rows_on_ray(PoisonRows, replace(run, device=replace(run.device, threads=1))):
        workers = [allowed(pid) for pid in row_workers()]
    # of the computing thread, and of the threads that it has started
    processors = [min(threads, key=len) for threads in workers]
    assert [len(cpus) for cpus in processors] == [1] * number
    assert len(set().union(*processors)) == number


def allowed(pid: int) -> list[set[int]]:
    """Return the processors that each thread of a process may use."""
    threads = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # the process has ended meanwhile
            threads.append(os.sched_getaffinity(int(thread)))
    return threads


def test_vectors_match_one_process(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("Once\nupon a time\nthere was\n")
    run = run_of(data)
    run = replace(run, task=Task.embed, decode=DecodeConfig(), model=replace(run.model, path=str(chatty)))
    run_embed(replace(run, parallel=ParallelConfig()), tmp_path / "single", dump)
    run_embed(run, tmp_path / "ray", dump)
    for name in ("embeddings.npy", "rows.jsonl"):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "single" / name).read_bytes()


def test_a_row_that_kills_all_it_may_is_an_error_and_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas. In the second one the row runs alone. test_dispatch.py has the product's numbers."""
    from pipelines.replicas import dispatch, row_replicas

    for module in (dispatch, row_replicas):
        monkeypatch.setattr(module, "MAX_LOSSES", 2)
    monkeypatch.setattr(dispatch, "ALONE_AFTER", 1)
    prompts = ["Once", "upon", POISON, "there", "was", "a", "dog", "who"]
    rows = iter([PromptRow(i, prompt=prompt, digest=f"{i:016x}") for i, prompt in enumerate(prompts)])
    run = replace(run_of(replicas=1), decode=DecodeConfig(max_new_tokens=2))
    with rows_on_ray(PoisonRows, run) as runner:
        records = [record for records in runner.steps(lambda: next(rows, None), 3) for record in records]
    errors = {record["row"]["index"]: record["row"]["error"] for record in records}
    assert len(records) == len(prompts)
    assert [index for index, error in errors.items() if error] == [prompts.index(POISON)]
    assert "2 replicas were lost with this row, which ran alone in the last one" in errors[prompts.index(POISON)]


def test_replicas_that_only_end_end_the_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from pipelines.replicas import row_replicas

    monkeypatch.setattr(row_replicas, "MAX_STARTS", 2)
    message = "every replica was lost 2 times in a row, the last one by: "
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=message):  # noqa: SIM117
        with rows_on_ray(UnloadableRows, run_of(replicas=1)):
            pass
    assert len([record for record in caplog.records if "is lost and restarted" in record.message]) == 1
    assert all_end()


def test_workers_that_stop_before_they_have_run_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.replicas import row_replicas
    from tests.helpers.stopped_worker import RowWorker

    monkeypatch.setattr(row_replicas, "RowWorker", RowWorker)
    monkeypatch.setattr(row_replicas, "BEGIN_S", 3.0)
    monkeypatch.setattr(row_replicas, "MAX_STARTS", 1)
    message = "every replica was lost 1 times in a row, the last one by: it has been silent for 3 s"
    with pytest.raises(UserError, match=message), rows_on_ray(PoisonRows, run_of(replicas=1)):
        pass
    assert all_end()


def test_a_place_that_another_job_has_is_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job releases its resources after the message. A silent wait would never end."""
    from ray.util.placement_group import placement_group, remove_placement_group

    from pipelines.replicas import row_replicas
    from pipelines.replicas.connection import connect

    monkeypatch.setattr(row_replicas, "PLACE_S", 0.5)
    cpus, _ = connect()
    other = placement_group([{"CPU": sum(cpus)}])
    assert other.wait(LIMIT_S)
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            remove_placement_group(other)

    listener = Listener(logging.WARNING)
    row_replicas.log.addHandler(listener)
    rows = iter([PromptRow(0, prompt="Once", digest="0" * 16)])
    run = replace(run_of(replicas=2), device=replace(tiny_run().device, threads=1))
    try:
        with rows_on_ray(PoisonRows, run) as runner:
            records = [record for records in runner.steps(lambda: next(rows, None), 3) for record in records]
    finally:
        row_replicas.log.removeHandler(listener)
    free = f"and 0 of {sum(cpus)} CPU are free: end other jobs, or give fewer replicas"
    assert said == [f"replicas 0, 1: waiting until Ray has 1 CPU free on one machine for each, {free}"]
    assert [record["row"]["error"] for record in records] == [None]


def test_replicas_that_would_give_different_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"would give different rows \(model/x\): give them equal machines"):  # noqa: SIM117
        with rows_on_ray(UnequalRows, run_of()):
            pass
    assert all_end()


def test_errors_of_the_model_or_the_machine_are_one_line(tmp_path: Path) -> None:
    run = run_of()
    wrong = [
        (replace(run, model=replace(run.model, path=str(tmp_path / "none"))), "none"),
        (
            replace(run, parallel=ParallelConfig(ParallelMode.ray, 4000)),
            "parallel.replicas=4000 needs 1 CPUs for each replica",
        ),
    ]
    for options, message in wrong:
        with pytest.raises(UserError, match=message):  # noqa: SIM117
            with rows_on_ray(PoisonRows, options):
                pass

"""A journal contains every row once, however the process that wrote it ended."""

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import UserError
from pipelines.jobs.journal import NAME, SEED, Journal, open_journal
from tests.helpers.cases import each
from tests.helpers.damage import MUTATIONS, mutated

JOB = {"input": "abc", "decode.seed": 3, "decode.stop": ["\n"], "model/config.json": "0" * 64}
MOMENTS = [f"2026-11-21_10-00-0{i}-000000" for i in range(4)]


def record(index: int, digest: str = "ff", text: str = "好") -> dict[str, Any]:
    return {"digest": digest, "num_cached_tokens": 0, "row": {"index": index, "text": text}}


def write(folder: Path, *records: dict[str, Any], fingerprint: dict[str, Any] = JOB) -> Path:
    with closing(open_journal("none", folder, fingerprint)) as journal:
        for one in records:
            journal.append(one)
    return folder / NAME


def read(journal: Journal) -> list[int]:
    return [record["row"]["index"] for record in journal.read()]


def test_rows_come_back_in_order_and_once(tmp_path: Path) -> None:
    rows = [record(2), record(0, text="\ud800"), record(1)]
    file = write(tmp_path, *rows)
    file.write_bytes(file.read_bytes() + json.dumps(record(0, text="again")).encode() + b"\n")
    with closing(open_journal("auto", tmp_path, JOB)) as journal:
        assert read(journal) == [2, 0, 1]
        assert journal.num_rows == 3
        assert list(journal.records()) == [rows[1], rows[2], rows[0]]
        journal.append(record(3))
        assert [one["row"]["index"] for one in journal.records()] == [0, 1, 2, 3]


def test_a_file_cut_anywhere_keeps_its_whole_lines_and_continues(tmp_path: Path) -> None:
    file = write(tmp_path, *[record(i) for i in range(3)])
    content = file.read_bytes()
    for length in range(len(content) + 1):
        file.write_bytes(content[:length])
        with closing(open_journal("auto", tmp_path, JOB)) as journal:
            num_lines = content[:length].count(b"\n")
            assert read(journal) == list(range(max(0, num_lines - 1)))
            for i in range(journal.num_rows, 3):
                journal.append(record(i))
        assert file.read_bytes() == content


@each("torn", [b"\0" * 50, b'{"digest": "ff"}\n', b"{}\n", b"\xff\xfe\n", b"[3]\n"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    file = write(tmp_path, record(0))
    content = file.read_bytes()
    file.write_bytes(content + torn)
    with closing(open_journal("auto", tmp_path, JOB)) as journal:
        assert read(journal) == [0]
    assert file.read_bytes() == content


def test_a_broken_line_elsewhere_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, record(0), record(1))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:1], b"broken\n", *lines[2:]]))
    with (
        closing(open_journal("auto", tmp_path, JOB)) as journal,
        pytest.raises(UserError, match="line 2 of .* is broken"),
    ):
        read(journal)
    file.write_bytes(b"".join([b"broken\n", *lines[1:]]))
    with pytest.raises(
        UserError, match="line 1 of .* is broken: delete that file, or begin again with predict.resume=none"
    ):
        open_journal("auto", tmp_path, JOB)


@each(
    "damage",
    [
        ('"index": 1', '"index": 1000000000000000000'),  # exabytes of offsets
        ('"index": 1', '"index": 1.5'),
        ('"index": 1', '"index": true'),
        ('"digest": "ff"', '"digest": "fffffffffffffffff"'),  # more than 64 bits
        ('"digest": "ff"', '"digest": "-1"'),
    ],
)
def test_a_line_that_no_job_wrote_is_broken(tmp_path: Path, damage: tuple[str, str]) -> None:
    file = write(tmp_path, record(0), record(1))
    content = file.read_text()
    assert damage[0] in content.splitlines()[2]
    lines = content.splitlines(keepends=True)
    lines[2] = lines[2].replace(*damage)
    file.write_text("".join(lines))
    with closing(open_journal("auto", tmp_path, JOB)) as journal:
        assert read(journal) == [0]  # the last line is treated as incomplete
    file.write_text("".join([*lines, lines[1]]))
    with (
        closing(open_journal("auto", tmp_path, JOB)) as journal,
        pytest.raises(UserError, match="line 3 of .* is broken"),
    ):
        read(journal)


ROWS = st.permutations(range(6))
KILLS = st.lists(st.floats(0, 1), max_size=3)


@pytest.mark.long
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=ROWS, kills=KILLS, mutations=st.one_of(st.just([]), MUTATIONS))
def test_whatever_happens_to_the_file_every_row_is_there_once_or_nothing_is_touched(
    tmp_path: Path, order: list[int], kills: list[float], mutations: list[tuple[str, float, int]]
) -> None:
    """Processes are killed in the middle of a write, one after the other; then the file is damaged arbitrarily."""
    rows = {index: record(index, digest=f"{index + 1:x}", text="好" * index) for index in order}
    file = tmp_path / NAME
    file.unlink(missing_ok=True)
    for kill in kills:
        with closing(open_journal("auto", tmp_path, JOB)) as journal:
            done = read(journal)
            for index in order:
                if index not in done:
                    journal.append(rows[index])
        content = file.read_bytes()
        file.write_bytes(content[: int(kill * len(content))])
    before = file.read_bytes() if kills else b""
    file.write_bytes(damaged := mutated(before, mutations, head=len(before)))
    try:
        journal = open_journal("auto", tmp_path, JOB)
    except UserError:
        assert mutations
        assert file.read_bytes() == damaged
        return
    with closing(journal):
        try:
            done = read(journal)
        except UserError:
            assert mutations
            assert file.read_bytes() == damaged
            return
        # only a truncated last line is gone, or a truncated first one
        assert damaged.startswith(file.read_bytes()) or not done
        if journal.end > len(order):  # a damaged index: the job reports that its input has become shorter
            return
        for index in set(order) - set(done):
            journal.append(rows[index])
        records = list(journal.records())
    assert [one["row"]["index"] for one in records] == sorted(order)
    if not mutations:
        assert len(done) == max(0, before.count(b"\n") - 1)
        assert records == [rows[index] for index in sorted(order)]


def test_a_row_that_is_done_is_known_by_its_input(tmp_path: Path) -> None:
    write(tmp_path, record(1, "ab"))
    with closing(open_journal("auto", tmp_path, JOB)) as journal:
        assert read(journal) == [1]
        assert [journal.has(i, "ab") for i in range(3)] == [False, True, False]
        with pytest.raises(
            UserError, match="row 1 differs from the row that .* contains: give the same input, or begin again"
        ):
            journal.has(1, "ac")


@each("resume", ["auto", "folder"])
def test_another_job_is_refused_and_what_changed_is_named(tmp_path: Path, resume: str) -> None:
    write(tmp_path, record(0))
    other = {**JOB, "decode.seed": 4, "model/config.json": "1" * 64, "decode.n": 2}
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(UserError) as raised:
        open_journal(str(tmp_path) if resume == "folder" else "auto", tmp_path, other)
    message = str(raised.value)
    assert "decode.seed (3 -> 4)" in message
    assert 'model/config.json ("00000000000... -> "11111111111...)' in message
    assert "decode.n (null -> 2)" in message
    assert "input" not in message.split("these values changed: ")[1].split(". Restore")[0]
    assert (tmp_path / NAME).read_bytes() == before
    with closing(open_journal("none", tmp_path, other)) as journal:  # and the rejected one's lock is free
        assert read(journal) == []


def test_two_runs_never_write_one_journal(tmp_path: Path) -> None:
    folder = tmp_path / MOMENTS[0]
    write(folder, record(0))
    with closing(open_journal("auto", folder, JOB)):
        for resume in ("auto", "none", str(folder)):
            with pytest.raises(UserError, match="another run is writing .*: wait until it ends"):
                open_journal(resume, folder, JOB)
        with closing(open_journal("auto", tmp_path / MOMENTS[1], JOB)) as beside:
            assert beside.folder == tmp_path / MOMENTS[1]  # the unfinished one is in use


def test_auto_resumes_the_newest_equal_job_of_the_parent_folder(tmp_path: Path) -> None:
    for moment, job in zip(MOMENTS, [JOB, JOB, {**JOB, "decode.seed": 1}, JOB], strict=True):
        write(tmp_path / moment, record(0), fingerprint=job)
    (tmp_path / MOMENTS[3] / NAME).write_bytes(b"broken\n")  # must not be judged by a caller that did not name it
    write(tmp_path / "named", record(0))
    new = tmp_path / "2026-11-21_11-00-00-000000"
    with closing(open_journal("auto", new, JOB)) as journal:
        assert journal.folder == tmp_path / MOMENTS[1]
        assert not new.exists()
    with closing(open_journal("none", new, JOB)) as journal:
        assert journal.folder == new
    with closing(open_journal("auto", tmp_path / "also named", JOB)) as journal:
        assert journal.folder == tmp_path / "also named"


def without_seed(file: Path) -> None:
    """Return the first line as earlier versions wrote it."""
    header, *rest = file.read_text().splitlines()
    values = {name: value for name, value in json.loads(header).items() if name != SEED}
    file.write_text("\n".join([json.dumps(values), *rest, ""]))


@each("resume", ["auto", "folder"])
@each("seed", [3, None])
def test_a_journal_without_a_seed_has_the_given_one_or_always_the_same(
    tmp_path: Path, resume: str, seed: int | None
) -> None:
    job = {**JOB, "decode.seed": seed}
    folder = tmp_path / MOMENTS[0]
    without_seed(write(folder, record(0), fingerprint=job))
    seeds = []
    for _ in range(2):
        how = str(folder) if resume == "folder" else "auto"
        with closing(open_journal(how, tmp_path / MOMENTS[1], job)) as journal:
            assert (journal.folder, read(journal)) == (folder, [0])
            seeds.append(journal.seed)
        job = {**JOB, "decode.seed": seeds[0]}  # config.yaml names it from now on
    assert None not in seeds
    assert seeds == [seed or seeds[0]] * 2


def test_standard_input_is_resumed_only_by_name(tmp_path: Path) -> None:
    job = {**JOB, "input": None}
    write(tmp_path / MOMENTS[0], record(0), fingerprint=job)
    with closing(open_journal("auto", tmp_path / MOMENTS[1], job)) as journal:
        assert journal.folder == tmp_path / MOMENTS[1]
    with closing(open_journal(str(tmp_path / MOMENTS[0]), tmp_path / MOMENTS[2], job)) as journal:
        assert read(journal) == [0]
        assert journal.kept.endswith(f"python run.py predict.resume={tmp_path / MOMENTS[0]} < THE SAME INPUT")


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no journal.jsonl: give the folder of an unfinished job, auto or none"):
        open_journal(str(tmp_path), tmp_path, JOB)
    (tmp_path / "predictions.jsonl").touch()
    with pytest.raises(UserError, match=r"has no journal.jsonl \(its job is finished\)"):
        open_journal(str(tmp_path), tmp_path, JOB)
    (tmp_path / "predictions.jsonl").unlink()
    with closing(open_journal("none", tmp_path, JOB)) as journal:  # just removed
        journal.remove()
        with pytest.raises(UserError, match="has no journal"):
            open_journal(str(tmp_path), tmp_path, JOB)
        with closing(open_journal("auto", tmp_path, JOB)) as another:
            assert another.num_rows == 0


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_journal("none", tmp_path, JOB)) as journal:
        journal.append(record(0))
        content = journal.path.read_bytes()
        real = os.write

        def full(fd: int, data: bytes) -> int:
            if len(data) < 30:
                raise OSError(28, "No space left on device")
            return real(fd, data[:20])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(
            UserError, match=r"cannot be written \(No space left on device\): 1 rows are done and kept, go on"
        ):
            journal.append(record(1))
        assert journal.path.read_bytes() == content
        monkeypatch.undo()
        journal.append(record(1))
    with closing(open_journal("auto", tmp_path, JOB)) as journal:
        assert read(journal) == [0, 1]

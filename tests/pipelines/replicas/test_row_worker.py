"""A replica's process, without Ray: its messages and answers."""

import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conf.decoding import DecodeConfig
from conf.schema import ParallelConfig, ParallelMode, RunConfig
from conf.tasks import PredictConfig
from kernels import build
from pipelines.jobs.journal import dumps
from pipelines.jobs.prompts import PromptRow, parse_row
from pipelines.jobs.rows import EngineRows, Record
from pipelines.replicas.messages import (
    Failed,
    Load,
    Ready,
    Work,
    Worked,
    encode,
    read_answer,
    read_record,
    read_row,
    row_bytes,
)
from pipelines.replicas.row_worker import RowWorker
from pipelines.tasks.embed import EmbedRows
from pipelines.tasks.predict import PredictRows
from tests.helpers.builders import run_config
from tests.helpers.launchers import SRUN

ROWS: list[dict[str, Any]] = [
    {"prompt": "Once", "decode": {"temperature": 0.9, "logprobs": 2}},
    {"prompt": "\ud800"},
    {"prompt_token_ids": [3, 4, 5], "id": 7, "decode": {"logit_bias": {"5": 1.5}, "seed": 2**64 - 1}},
    {"promt": "Once"},
    {"prompt": "I love", "decode": {"max_new_tokens": 1}},
]


def run_of(folder: Path) -> RunConfig:
    run = run_config(folder)
    decode, predict = DecodeConfig(max_new_tokens=9, temperature=0.7), PredictConfig(batch_size=2)
    return replace(run, model=replace(run.model, tokenizer=""), decode=decode, predict=predict)


def rows() -> Iterator[PromptRow]:
    for index, values in enumerate(ROWS):
        yield replace(parse_row(index, values), digest=f"{index:016x}")


def loaded(run: RunConfig, kind: type[EngineRows] = PredictRows) -> tuple[RowWorker, Ready]:
    worker = RowWorker()
    answer = read_answer(worker.load(kind, encode(Load(run, 0))))
    assert isinstance(answer, Ready), answer
    return worker, answer


def work(worker: RowWorker, *rows: PromptRow) -> list[Record]:
    answer = read_answer(worker.work(encode(Work(3, list(map(row_bytes, rows))))))
    assert isinstance(answer, Worked), answer
    return list(map(read_record, answer.records))


@pytest.mark.parametrize(
    "values", [*ROWS, {"query": "a", "document": "b"}, {"messages": [{"role": "user", "content": "\udc00"}]}]
)
def test_a_row_is_the_same_at_the_other_end(values: dict[str, Any]) -> None:
    row = replace(parse_row(5, values), digest="00000000000000ff")
    there = read_row(row_bytes(row))
    assert (there, there.digest) == (row, row.digest)


def test_records_match_one_process(chatty: Path) -> None:
    run = run_of(chatty)
    alone = PredictRows.load(run)
    source = rows()
    wanted = [record for records in alone.steps(lambda: next(source, None), 3) for record in records]
    assert sorted(record["row"]["index"] for record in wanted if record["row"]["error"]) == [1, 3]
    worker, ready = loaded(run)
    assert ready.loaded == alone.loaded
    first, *others = rows()
    results = work(worker, first, others[0])
    while more := work(worker, *others[1:]):
        others = []
        results += more
    assert sorted(map(dumps, results)) == sorted(map(dumps, wanted))


def test_rows_continue_in_the_next_call(chatty: Path) -> None:
    """A call without new rows computes the present rows, and returns when one is done."""
    worker, _ = loaded(run_of(chatty))
    first, _, _, _, last = rows()
    (short,) = work(worker, first, last)
    assert short["row"]["index"] == last.index
    (long,) = work(worker)
    assert (long["row"]["index"], long["row"]["num_generated_tokens"]) == (first.index, 9)
    assert work(worker) == []
    assert work(worker, last) == [short]  # it begins again


@pytest.mark.long
@pytest.mark.skipif(build.library() is None, reason="ranks need the C++ kernels")
def test_a_replica_starts_its_ranks_where_a_launcher_has_started_ray(
    chatty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example with `srun ray start` on two machines, whose variables Ray's workers inherit."""
    run, (*_, last) = run_of(chatty), rows()
    alone = work(loaded(run)[0], last)
    for name, value in (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).items():
        monkeypatch.setenv(name, value)
    worker, _ = loaded(replace(run, parallel=ParallelConfig(ParallelMode.tp, tp=2)))
    assert work(worker, last) == alone
    del worker  # its ranks end with it
    gc.collect()


def test_errors_of_the_user_are_answers(chatty: Path, tmp_path: Path) -> None:
    run = run_of(chatty)
    wrong = [
        (replace(run, model=replace(run.model, path=str(tmp_path / "none"))), "none"),
        (
            replace(run, predict=PredictConfig(batch_size=4096)),
            "batch_size=4096 is more than device.max_batched_tokens",
        ),
        (replace(run, decode=DecodeConfig(max_new_tokens=128)), "is more than the model takes .*: give auto"),
        (replace(run, predict=PredictConfig(chat_template=str(tmp_path / "x.jinja"))), "cannot be read"),
        (replace(run, parallel=ParallelConfig(ParallelMode.ray)), "parallel=ray is for the rows of a job"),
    ]
    for options, message in wrong:
        answer = read_answer(RowWorker().load(PredictRows, encode(Load(options, 0))))
        assert isinstance(answer, Failed)
        assert re.search(message, answer.message), answer.message


def test_vectors_come_as_the_journal_keeps_them(chatty: Path) -> None:
    run = replace(run_of(chatty), decode=DecodeConfig())
    run = replace(run, task=type(run.task).embed)
    alone, source = EmbedRows.load(run), iter([PromptRow(0, prompt="Once")])
    ((wanted,),) = (records for records in alone.steps(lambda: next(source, None), None) if records)
    worker, ready = loaded(run, EmbedRows)
    assert ready.loaded.num_values == alone.loaded.num_values > 0
    assert work(worker, PromptRow(0, prompt="Once", digest=wanted["digest"])) == [wanted]


def test_bytes_that_are_not_message_are_refused() -> None:
    for content in (b"", b"\xc1", encode({"type": "Worked", "records": 3})):
        with pytest.raises(msgspec.DecodeError):
            read_answer(content)

"""The predict job in one process: batch sizes, models without a tokenizer, jobs whose rows all fail."""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig, Task
from conf.support.terminal import escape_control_chars
from conf.tasks import OutputForm, PredictConfig, Truncation
from models.tokenizers import template_process
from pipelines.engine import Engine, Output
from pipelines.jobs.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.jobs.prompts import PromptRow
from pipelines.tasks.predict import run_predict
from tests.helpers.builders import run_config
from tests.helpers.cases import each

PROMPTS = [
    "Once upon a time",
    "x",
    "今天天气很好",
    "  two  spaces",
    "hello, world!",
    "a",
    "The dog said: it was a good day",
]


def job(chatty: Path, data: Path | str, batch_size: int = 3, tokenizer: str | None = "", **decode: object) -> RunConfig:
    run = run_config(chatty)
    return replace(
        run,
        model=replace(run.model, tokenizer=tokenizer),
        decode=DecodeConfig(**{"max_new_tokens": 12, **decode}),  # type: ignore[arg-type]
        predict=PredictConfig(data=str(data), batch_size=batch_size),
    )


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


@each("decode", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.2}])
def test_any_batch_size_gives_the_same_rows_in_order(chatty: Path, tmp_path: Path, decode: dict[str, object]) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("\n".join(PROMPTS), encoding="utf-8")
    for batch_size in (1, 3, 100):
        run_predict(job(chatty, data, batch_size, **decode), tmp_path / str(batch_size), dump)
    first = rows(tmp_path / "1")
    assert [row["prompt"] for row in first] == PROMPTS
    assert rows(tmp_path / "3") == rows(tmp_path / "100") == first


def test_without_a_tokenizer_token_ids_still_work(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    data.write_text('{"prompt_token_ids": [0, 70]}\n{"prompt": "Once"}\n')
    run_predict(job(chatty, data, tokenizer=None), tmp_path / "out", dump)
    ids, text = rows(tmp_path / "out")
    assert (ids["prompt"], ids["text"], ids["num_generated_tokens"]) == (None, None, 12)
    assert "there is no tokenizer for this text: give prompt_token_ids" in str(text["error"])


def test_several_completions_are_all_in_the_row_and_the_first_is_its_own(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Engine.steps

    def twice(self: Engine, *arguments: Any, **named: Any) -> Iterator[list[Output]]:
        for outputs in steps(self, *arguments, **named):
            firsts = [output.completions[0] for output in outputs]
            both = [[first, replace(first, text="!", token_ids=[5])] for first in firsts]
            yield [replace(output, completions=completions) for output, completions in zip(outputs, both, strict=True)]

    monkeypatch.setattr(Engine, "steps", twice)
    run_predict(job(chatty, "Once", logprobs=0), tmp_path / "out", dump)
    (row,) = rows(tmp_path / "out")
    assert list(row)[-4:] == ["num_generated_tokens", "logprobs", "completions", "error"]
    first, second = row["completions"]  # type: ignore[misc]
    assert first == {name: row[name] for name in ("text", "token_ids", "finish_reason", "logprobs")}
    assert (second["text"], second["token_ids"], row["num_generated_tokens"]) == ("!", [5], 12 + 1)
    texts = (tmp_path / "out" / "text_generation_result.txt").read_text(encoding="utf-8")
    assert texts == str({"text_generation_text": [f"Once{row['text']}", "Once!"]}) + "\n"


def test_results_in_a_file_of_the_users_choice(chatty: Path, tmp_path: Path) -> None:
    """In both formats, with truncated prompts. A resumed job has the data of the rows that its first process read."""
    data, file = tmp_path / "rows.json", tmp_path / "out.json"
    data.write_text(
        '{"src": "Once upon a time", "tgt": "x"}\n{"src": ["a", "b"], "tgt": ["c"]}\n{"prompt": "今天"}\n{"src": 5}\n'
    )
    run = job(chatty, data, 1)
    settings = replace(run.predict, output_file=str(file), truncate=Truncation.left, max_prompt_tokens=3)
    run_predict(replace(run, predict=settings), tmp_path / "rows", dump)
    assert file.read_bytes() == (tmp_path / "rows" / "predictions.jsonl").read_bytes()
    texts = rows(tmp_path / "rows")
    cut = [row.get("num_truncated_tokens", 0) for row in texts]
    assert [bool(number) for number in cut] == [True, True, True, False]
    assert texts[0]["num_prompt_tokens"] == 3
    metrics = json.loads((tmp_path / "rows" / "metrics.json").read_text())
    assert (metrics["num_truncated_rows"], metrics["unused_fields"]) == (3, ["tgt"])

    settings = replace(settings, output_form=OutputForm.paddlenlp, max_errors=0)
    with pytest.raises(UserError, match="more than predict.max_errors=0 rows failed"):
        run_predict(replace(run, predict=settings), tmp_path / "paddle", dump)
    run_predict(replace(run, predict=replace(settings, max_errors=1)), tmp_path / "paddle", dump)
    written = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    sources = [("Once upon a time", "x"), (["a", "b"], ["c"]), ("今天", ""), ("", "")]
    assert [(row["src"], row["tgt"], row["output"]) for row in written] == [
        (*source, row["text"]) for source, row in zip(sources, texts, strict=True)
    ]
    assert [row.get("error") for row in written] == [row["error"] for row in texts]
    assert json.loads((tmp_path / "paddle" / "metrics.json").read_text())["unused_fields"] == []


def test_output_files_that_cannot_be_are_refused_before_the_model_is_loaded(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("Once\n")
    run = job(chatty, data)
    for file, reason in (
        (data, "is predict.data itself"),
        (tmp_path, "is not a file"),
        (tmp_path / "a" / "b", "cannot be written"),
    ):
        with pytest.raises(UserError, match=reason):
            run_predict(replace(run, predict=replace(run.predict, output_file=str(file))), tmp_path / "out", dump)
    file_run = replace(run, predict=replace(run.predict, output_file=str(tmp_path / "predictions.jsonl")))
    with pytest.raises(UserError, match="predictions.jsonl is a file that the run itself writes: give another name"):
        run_predict(file_run, tmp_path, dump)
    (tmp_path / "there").touch()
    for prompt in ("word " * 20, "x" * 300):  # the second one is longer than a file name may be
        cut = PredictConfig(prompt, truncate=Truncation.left, max_prompt_tokens=5, output_file=str(tmp_path / "there"))
        run_predict(replace(job(chatty, "", max_new_tokens=1), predict=cut), tmp_path / "long", dump)
    assert data.read_text() == "Once\n"
    assert not (tmp_path / "out").exists()
    for settings in (
        {"truncate": Truncation.left},
        {"max_prompt_tokens": 5},
        {"output_form": OutputForm.paddlenlp},
        {"output_file": ""},
    ):
        with pytest.raises(UserError, match="predict"):
            PredictConfig(**settings)  # type: ignore[arg-type]
    for task in (Task.embed, Task.score):
        with pytest.raises(UserError, match=f"predict.output_file=x is not used by task={task.name}: leave it at null"):
            RunConfig(task=task, predict=PredictConfig(output_file="x"))


def test_if_nothing_works_the_rows_say_why_and_the_job_fails(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text('{"id": "\\ud800", "promt": 1}\nnope\n')
    with pytest.raises(UserError, match="none of the 2 rows could be predicted; the first: the row has none of prompt"):
        run_predict(job(chatty, data), tmp_path / "out", dump)
    assert [row["finish_reason"] for row in rows(tmp_path / "out")] == ["error", "error"]
    assert rows(tmp_path / "out")[0]["id"] == "\ud800"


def test_settings_that_fit_no_prompt_fail_before_anything_is_written(chatty: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="decode.max_length=1000 is more than the model takes"):
        run_predict(job(chatty, "hello", max_new_tokens=None, max_length=1000), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


def test_more_new_tokens_than_fit_are_refused_with_the_number_that_fits_every_row(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    lengths = [3, 9, 200, 4]  # the third of these fits at no number
    data.write_text("\n".join(json.dumps({"prompt_token_ids": [5] * length}) for length in lengths) + "\nbad\n")
    with pytest.raises(
        UserError, match="decode.max_new_tokens=5000 is more than the model takes .*: give at most 119 with 9"
    ):
        run_predict(job(chatty, data, max_new_tokens=5000), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()
    run_predict(job(chatty, data, max_new_tokens=119, ignore_eos=True), tmp_path / "out", dump)
    assert [row["num_generated_tokens"] for row in rows(tmp_path / "out")] == [119, 119, 0, 119, 0]
    run_predict(job(chatty, data, max_new_tokens="auto", ignore_eos=True), tmp_path / "auto", dump)
    assert [row["num_generated_tokens"] for row in rows(tmp_path / "auto")] == [125, 119, 0, 124, 0]


def test_a_row_may_ask_for_as_many_new_tokens_as_fit(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        '{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [5, 6], "decode": {"max_new_tokens": "auto"}}\n'
    )
    run_predict(job(chatty, data, max_new_tokens=4, ignore_eos=True), tmp_path / "out", dump)
    assert [row["num_generated_tokens"] for row in rows(tmp_path / "out")] == [4, 126]


def test_standard_input_is_not_read_for_a_number(chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    with pytest.raises(
        UserError, match=r"is more than the model takes \(max_position_embeddings=128\): give auto, which uses"
    ):
        run_predict(job(chatty, "-", max_new_tokens=128), tmp_path / "out", dump)


def test_missing_data_is_named(chatty: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="predict.data is missing: give a prompt"):
        run_predict(replace(job(chatty, "x"), predict=PredictConfig()), tmp_path / "out", dump)


def test_a_folder_that_cannot_be_written_leaves_nothing(chatty: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        run_predict(job(chatty, "hello"), tmp_path / "file" / "out", dump)


# A row that fails alone

GOOD = {"prompt": "Once upon a time", "id": "good"}
BAD_ROWS = [
    ('{"prompt":"Once","decode":{"bad_words":["\\ud800"]}}', "decode.bad_words=.* without half a surrogate pair"),
    ('{"prompt":"Once","decode":{"stop":["a","\\udfff"]}}', "decode.stop=.* without half a surrogate pair"),
    ('{"prompt":"Once","id":"\\ud800"}', "id has half a surrogate pair at character 0"),
    ('{"prompt":"On\\ud800ce"}', "the text has half a surrogate pair at character 2"),
    ('{"prompt":"Once","decode":{"logit_bias":{"' + "1" * 4301 + '":1}}}', "decode.logit_bias=.* numbers from -100 to 100"),
    ('{"prompt":"Once","decode":{"logit_bias":{"5":NaN}}}', "decode.logit_bias=.* numbers from -100 to 100"),
    ('{"prompt":"Once","decode":{"seed":' + "1" * 4301 + "}}", "not a JSON object: Exceeds the limit"),
    ('{"prompt":"Once","decode":{"seed":' + "1" * 4299 + "}}", r"decode.seed=1{200}\.\.\. is not allowed"),
    ('{"prompt":"Once","decode":{"temperature":NaN}}', "decode.temperature=nan is not allowed"),
    ('{"prompt":"Once","decode":{"top_p":-Infinity}}', "decode.top_p=-inf is not allowed"),
    ('{"prompt":"Once","decode":{"max_new_tokens":1e999}}', "decode.max_new_tokens=inf is not of type"),
    ('{"prompt":"Once","decode":{"stop":' + "[" * 900 + "]" * 900 + "}}", r"decode.stop=\[+\.\.\. is not of type"),
    ('{"prompt_token_ids":' + "[" * 900 + "]" * 900 + "}", r"prompt_token_ids must be numbers from 0, not \[+\.\.\."),
    ('{"prompt":"Once","decode":{"' + "x" * 4000 + '":1}}', r"decode.x{200}\.\.\. does not exist"),
]  # fmt: skip


def test_whatever_is_wrong_with_a_row_is_its_error_and_stops_no_other(chatty: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{line}\n{json.dumps(GOOD)}\n" for line, _ in BAD_ROWS))
    run = job(chatty, data)
    ends_early = replace(run, predict=replace(run.predict, max_errors=1))
    with pytest.raises(UserError, match="more than predict.max_errors=1 rows failed; the first is row 0"):
        run_predict(ends_early, tmp_path / "out", dump)
    run_predict(run, tmp_path / "out", dump)  # continues after rows that failed
    done = rows(tmp_path / "out")
    for row, (_, message) in zip(done[::2], BAD_ROWS, strict=True):
        assert re.match(message, str(row["error"]))
    run_predict(job(chatty, "Once upon a time"), tmp_path / "alone", dump)
    assert {str(row["text"]) for row in done[1::2]} == {str(rows(tmp_path / "alone")[0]["text"])}
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_resumed_rows"] > 0


class Panic(BaseException):
    """Raises an exception as a panic in a Rust library does."""


Panic.__name__ = "PanicException"


@each("raised", [KeyError("what"), Panic("what")])
def test_an_unexpected_exception_is_logged_and_is_the_error_of_its_row(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: BaseException
) -> None:  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    encode = PromptEncoder.encode

    def failing(self: PromptEncoder, row: PromptRow) -> EncodedPrompt:
        if row.prompt == "b":
            raise raised
        return encode(self, row)

    monkeypatch.setattr(PromptEncoder, "encode", failing)
    run_predict(job(chatty, data), tmp_path / "out", dump)
    first, second = rows(tmp_path / "out")
    assert (first["error"], second["error"]) == (None, f"{type(raised).__name__}: {raised}")
    (record,) = caplog.records
    assert (record.message, record.exc_info and record.exc_info[1]) == ("row 1 failed", raised)


def test_a_chat_template_without_end_is_the_error_of_its_rows(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "CPU_S", 0.15)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template, data = tmp_path / "chat.jinja", tmp_path / "rows.txt"
    template.write_text("{% if messages[0].content == 'b' %}" + loops + "{% endif %}{{ messages[0].content }}")
    data.write_text("a\nb\nc\n")
    run = job(chatty, data)
    run_predict(replace(run, predict=replace(run.predict, chat_template=str(template))), tmp_path / "out", dump)
    errors = [row["error"] for row in rows(tmp_path / "out")]
    assert (errors[0], errors[2]) == (None, None)
    assert "the chat template was stopped, because it takes more than 0.15 s: give predict.chat_template" in str(
        errors[1]
    )


@each("raised", [MemoryError(), OSError("disk"), KeyboardInterrupt()])
def test_an_error_of_the_whole_job_ends_it(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def failing(self: PromptEncoder, row: PromptRow) -> EncodedPrompt:
        raise raised

    monkeypatch.setattr(PromptEncoder, "encode", failing)
    with pytest.raises(type(raised)):
        run_predict(job(chatty, "a"), tmp_path / "out", dump)


def test_control_characters_are_shown_at_the_terminal_and_kept_in_files(
    chatty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = "a\x1b[31m\x07\u202e"
    data = tmp_path / "rows.jsonl"
    keyed = {"prompt": attack, "id": attack, f"key{attack}\n": 1}
    data.write_text(f"{json.dumps(keyed)}\n{json.dumps({'prompt': 'x', 'decode': {attack: 1}})}\n")
    run_predict(job(chatty, data), tmp_path / "out", dump)
    out = capsys.readouterr().out
    shown = r"a\x1b[31m\x07\u202e"
    assert f"[0] {shown}\n" in out
    assert f" -> error: decode.{shown} does not exist" in out
    assert f"that are not used: key{shown}\\n\n" in out
    text = str(rows(tmp_path / "out")[0]["text"])
    assert not set(escape_control_chars(text)) & {"\x1b", "\x07"}
    assert f" -> {escape_control_chars(text)}\n" in out
    assert not [c for c in out if c in "\x1b\x07\u202e"]
    row = rows(tmp_path / "out")[0]
    assert (row["prompt"], row["id"]) == (attack, attack)
    assert f"key{attack}\n" in json.loads((tmp_path / "out" / "metrics.json").read_text())["unused_fields"]

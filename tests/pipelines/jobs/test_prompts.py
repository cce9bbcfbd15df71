"""The meaning of predict.data."""

import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from pipelines.jobs.prompts import PromptRow, Prompts, read_prompts, rows_from_python
from tests.helpers.cases import each
from tests.helpers.prompt_files import HELLO, read_jsonl, write


def read_txt(folder: Path, content: str | bytes) -> Prompts:
    return read_prompts(write(folder, "prompts.txt", content))


def read_stdin(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> Prompts:
    data = content.encode() if isinstance(content, str) else content
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return read_prompts("-")


def texts(prompts: Prompts) -> list[str | None]:
    rows = list(prompts)
    assert [row.index for row in rows] == list(range(len(rows)))
    assert not [row.error for row in rows if row.error]
    return [row.prompt for row in rows]


# Text files


@each(
    ("content", "expected"),
    [
        ("a\nb\n", ["a", "b"]),  # two lines
        ("a\nb", ["a", "b"]),  # no end of the last line
        ("a\r\nb\r\n", ["a", "b"]),  # CRLF
        ("héllo 世界 🙂\n", ["héllo 世界 🙂"]),  # UTF-8
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),  # BOM
        ("a\\nb\\n\nc\n", ["a\nb\n", "c"]),  # escaped line ends
        ("  a \t\n", ["  a \t"]),  # spaces are kept
        ('{"prompt": "a"}\n', ['{"prompt": "a"}']),  # JSON is text
        ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\ni\n", ["a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh", "i"]),
    ],
)
def test_txt(tmp_path: Path, content: str | bytes, expected: list[str]) -> None:
    prompts = read_txt(tmp_path, content)
    assert texts(prompts) == expected
    assert prompts.num_blank_lines == 0


def test_blank_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    prompts = read_txt(tmp_path, "\na\n\n \t\r\nb\n\n")
    assert texts(prompts) == ["a", "b"]
    assert prompts.num_blank_lines == 4


@each("name", ["empty.txt", "empty.jsonl"])
@each("content", [b"", b"\n", b" \r\n\n", b"\xef\xbb\xbf"])
def test_file_without_prompts(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(UserError, match=rf"{name} has no prompts"):
        read_prompts(write(tmp_path, name, content))


@each("name", ["latin.txt", "latin.jsonl"])
def test_file_that_is_not_utf8(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} is not UTF-8 \(byte 3 is 0xe9\): convert it first"):
        read_prompts(write(tmp_path, name, b"caf\xe9\n"))


# Rows of JSON


@each(
    ("row", "expected"),
    [
        ({"prompt": "a\nb"}, {"prompt": "a\nb"}),  # prompt
        ({"prompt": "a\\nb"}, {"prompt": "a\\nb"}),  # escapes are JSON's alone
        ({"prompt": ""}, {"prompt": ""}),  # empty prompt
        ({"prompt_token_ids": [1, 2, 2]}, {"prompt_token_ids": [1, 2, 2]}),  # ids
        ({"messages": HELLO}, {"messages": HELLO}),  # messages
        ({"src": "a", "tgt": "b"}, {"prompt": "a"}),  # src
        ({"prompt": "a", "messages": None}, {"prompt": "a"}),  # null is absent
        ({"prompt": "a", "id": "x"}, {"prompt": "a", "id": "x"}),  # text id
        ({"prompt": "a", "id": 7}, {"prompt": "a", "id": 7}),  # number id
        ({"prompt": "a", "decode": {"top_k": 3}}, {"prompt": "a", "decode": {"top_k": 3}}),  # decode
    ],
)
def test_json_row(tmp_path: Path, row: object, expected: dict[str, Any]) -> None:
    assert list(read_jsonl(tmp_path, row)) == [PromptRow(0, **expected)]


@each(
    ("row", "message"),
    [
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"prompt_token_ids": [' + "1" * 5000 + "]}", "not a JSON object"),
        ([1], "not a JSON object but list"),
        ("null", "not a JSON object but NoneType"),
        ({}, "the row has none of prompt, messages, prompt_token_ids, src, query: give exactly one"),
        ({"prompt": None}, "the row has none of"),
        ({"prompt": "a", "src": "b"}, "the row has prompt and src of"),
        ({"prompt": 3}, "prompt is of type int, not str"),
        ({"prompt": "a", "decode": [1]}, "decode is of type list, not dict"),
        ({"prompt": "a", "id": [1]}, "id=[1] is neither"),
        ({"prompt": "a", "id": True}, "id=True is neither"),
        ({"prompt_token_ids": "1 2"}, "prompt_token_ids is of type str, not list"),
        ({"prompt_token_ids": [1, "2"]}, "prompt_token_ids must be numbers"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids must be numbers"),
        ({"messages": []}, "messages is empty: give at least one"),
        ({"messages": {"role": "user", "content": "a"}}, "messages is of type dict, not list"),
        ({"messages": ["a"]}, "messages must be objects"),
        ({"messages": [{"content": "a"}]}, "messages must be objects"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages must be objects"),
        ({"src": 3}, "src=3 tgt=None is not allowed: give texts or lists of texts"),
        ({"src": []}, "src=[] tgt=None is not allowed"),
        ({"src": ["a", 3], "tgt": ["b"]}, "src=['a', 3] tgt=['b'] is not allowed"),
        ({"src": ["a", "b"]}, "src has 2 rounds and tgt 0: every round but the last needs its answer"),
        ({"src": ["a"], "tgt": ["b", "c"]}, "src has 1 rounds and tgt 2"),
    ],
)
def test_bad_row_becomes_an_error_and_stops_no_other(tmp_path: Path, row: object, message: str) -> None:
    first, bad, last = read_jsonl(tmp_path, {"prompt": "a"}, row, {"prompt": "b", "id": "last"})
    assert (first, last) == (PromptRow(0, prompt="a"), PromptRow(2, "last", prompt="b"))
    assert (bad.index, bad.prompt, bad.messages, bad.prompt_token_ids) == (1, None, None, None)
    assert bad.error is not None
    assert bad.error.startswith(message)


def test_bad_row_keeps_its_id(tmp_path: Path) -> None:
    (row,) = read_jsonl(tmp_path, {"id": "x"})
    assert row.id == "x"


@each(
    ("row", "rounds"),
    [
        ({"src": ["a"]}, ["a"]),
        ({"src": ["a"], "tgt": ["x"]}, ["a"]),  # the last answer is left out
        ({"src": ["a", "b"], "tgt": ["x"]}, ["a", "x", "b"]),
        ({"src": ["a", "b"], "tgt": "x"}, ["a", "x", "b"]),
        ({"src": ["a", "b", "c"], "tgt": ["x", "y", "z"]}, ["a", "x", "b", "y", "c"]),
    ],
)
def test_src_and_tgt_are_rounds(tmp_path: Path, row: object, rounds: list[str]) -> None:
    expected = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(rounds)]
    assert list(read_jsonl(tmp_path, row)) == [PromptRow(0, messages=expected)]


def test_unused_fields_are_reported(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 1, "decode": {}, "zeta": 1}, {"src": "a", "tgt": "b", "alpha": 2, "zeta": 3}]
    prompts = read_jsonl(tmp_path, *rows)
    assert len(list(prompts)) == 2
    assert prompts.unused_fields == ["alpha", "tgt", "zeta"]  # tgt is used if src is a list


def test_jsonl_keeps_the_lines_of_txt(tmp_path: Path) -> None:
    content = '\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'
    prompts = read_prompts(write(tmp_path, "prompts.jsonl", content))
    assert texts(prompts) == ["a\u2028b", "c"]
    assert prompts.num_blank_lines == 1


# A row at a time


def test_the_counts_of_a_file_are_known_before_its_first_row(tmp_path: Path) -> None:
    prompts = read_txt(tmp_path, "a\n\nb\n")
    assert prompts.num_rows == 2
    assert next(iter(prompts)).prompt == "a"


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    prompts = read_txt(tmp_path, "a\nb\n")
    read_txt(tmp_path, "a\nc\n")
    with pytest.raises(UserError, match=r"prompts\.txt changed while it was read: run it again"):
        list(prompts)


def test_equal_rows_have_equal_digests_and_equal_files_equal_sums(tmp_path: Path) -> None:
    first, second, third = read_txt(tmp_path, "a\nb\r\nb")
    assert first.digest != second.digest == third.digest
    contents = ["a\n", "a\nb\n", "b\n"]
    sums = {read(tmp_path, content).sha256 for content in contents for read in (read_txt, read_jsonl, read_txt)}
    assert len(sums) == 6  # the same lines are other rows in another format


def test_a_fault_is_placed_in_the_whole_stream(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not UTF-8 \(byte 9 is 0xff\)"):
        read_txt(tmp_path, b"\xef\xbb\xbfa\n\xe4\xbb\x8a\n\xff\n")


def test_standard_input_is_read_no_further_than_the_rows_that_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = read_stdin(monkeypatch, b"a\nb\n\xff\n")
    assert (prompts.num_rows, prompts.sha256) == (None, None)
    rows = iter(prompts)
    assert [next(rows).prompt, next(rows).prompt] == ["a", "b"]
    with pytest.raises(UserError, match=r"standard input is not UTF-8 \(byte 4 is 0xff\)"):
        next(rows)


def test_a_pipe_with_a_name_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["bash", "-c", f"printf 'a\\n[1]\\n' > {pipe}"])
    prompts = read_prompts(str(pipe))
    assert (prompts.sha256, texts(prompts)) == (None, ["a", "[1]"])
    assert writer.wait() == 0


# A path or a prompt


@each("data", ["nope.txt", "nope.jsonl", "nope/nope.txt", "/nope/nope.jsonl", "a\0b.txt"])
def test_missing_file_is_not_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot be read .*: give a prompt, a .txt, a .jsonl, or - for stdin"):
        read_prompts(data)


@each("data", ["prompts/all", "./prompts.csv", "/prompts"])
def test_path_without_a_known_suffix_is_not_a_prompt(data: str) -> None:
    with pytest.raises(UserError, match=r"looks like a path, but .*\.txt, a \.jsonl"):
        read_prompts(data)


def test_folder_is_not_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match=r"folder\.txt cannot be read"):
        read_prompts(str(tmp_path / "folder.txt"))


@each(
    "data",
    [
        "hello",
        "What is 1/2?",
        "Summarise notes.txt",
        "a / b.jsonl",
        "notes.md",
        " ",
        "~ hello",
        "a\\nb",
        "x" * 5000 + " .txt",
    ],
)
def test_everything_else_is_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = read_prompts(data)
    assert (prompts.num_rows, list(prompts), prompts.num_blank_lines) == (1, [PromptRow(0, prompt=data)], 0)


def test_file_with_spaces_in_its_name_is_read(tmp_path: Path) -> None:
    assert texts(read_prompts(write(tmp_path, "my prompts.txt", "a\n"))) == ["a"]


@each("name", ["P.TXT", "p.txt.gz", "P.Txt.GZ", "~/p.txt"])
def test_text_files_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    content = b"a\n\nb\xc3\xa9\n"
    path = name.replace("~", str(tmp_path)) if "~" in name else str(tmp_path / name)
    Path(path).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    prompts = read_prompts(name if "~" in name else path)
    assert (texts(prompts), prompts.num_blank_lines) == (["a", "bé"], 1)
    assert prompts.sha256 == read_txt(tmp_path, content).sha256  # a job continues with the same rows in another file


ROWS = [PromptRow(0, "x", prompt='a, "b"\nc'), PromptRow(1, prompt=""), PromptRow(2, "z", prompt="今天")]
TABLE = '\ufeffprompt,id,note\r\n"a, ""b""\nc",x,1\r\n\r\n,,\r\n今天,z,3'


@each(
    ("name", "content"),
    [
        ("a.jsonl.gz", '{"prompt": "a, \\"b\\"\\nc", "id": "x", "note": 1}\n\n{"prompt": ""}\n{"prompt": "今天", "id": "z"}'),
        ("a.csv", TABLE),
        ("A.CSV.gz", TABLE),
        ("a.json", '[{"prompt": "a, \\"b\\"\\nc", "id": "x", "note": 1}, "", {"prompt": "今天", "id": "z"}]'),
        # line by line
        ("a.json", '{"prompt": "a, \\"b\\"\\nc", "id": "x", "note": 1}\n{"prompt": ""}\n{"prompt": "今天", "id": "z"}\n'),
        ("a.JSON", '\ufeff{"prompt": ["a, \\"b\\"\\nc", "", "今天"],\n"id": ["x", null, "z"], "note": [1, 2, 3]}'),
    ],
)  # fmt: skip
def test_rows_of_every_form(tmp_path: Path, name: str, content: str) -> None:
    data = content.encode()
    prompts = read_prompts(write(tmp_path, name, gzip.compress(data) if name.endswith("gz") else data))
    assert prompts.num_rows == 3
    assert list(prompts) == ROWS
    assert prompts.unused_fields == ["note"]
    assert prompts.num_blank_lines == content.replace("\r", "").count("\n\n")


def test_a_json_of_one_line_may_be_a_row(tmp_path: Path) -> None:
    pairs = {"src": "a", "tgt": "b"}, {"src": ["a", "c"], "tgt": ["b"]}
    for values in pairs:
        (row,) = read_prompts(write(tmp_path, "a.json", json.dumps(values)))
        assert (row.error, row.source) == (None, values)
    (row,) = read_prompts(write(tmp_path, "a.json", '{"prompt": "a"}'))
    assert (row.prompt, row.source) == ("a", None)


def test_a_cell_is_as_long_as_a_prompt_and_an_invalid_row_of_a_list_is_an_error(tmp_path: Path) -> None:
    prompt = "a story, " * 20_000
    (row,) = read_prompts(write(tmp_path, "a.csv", f'prompt\n"{prompt}"\n'))
    assert row.prompt == prompt
    rows = list(read_prompts(write(tmp_path, "a.json", '["a", 3, {"prompt": 4}, {"prompt_token_ids": [5]}]')))
    assert [row.error for row in rows] == [None, "not a JSON object but int", "prompt is of type int, not str", None]
    assert (rows[0].prompt, rows[3].prompt_token_ids) == ("a", [5])


@each(
    ("name", "content", "message"),
    [
        ("a.csv", "text,id\na,1\n", "a.csv needs a first line of different names, one of them prompt, but it has text, id"),
        ("a.csv", "prompt,prompt\na,1\n", "needs a first line of different names"),
        ("a.csv", "prompt,id\nHello, you,1\n", "has 3 cells in line 2, but 2 columns: put cells that hold a comma into"),
        ("a.csv", 'prompt\n"a', "a.csv is not valid CSV in line 2 .unexpected end of data.: correct the line, or give a .jsonl"),
        ("a.csv", "prompt\n", "a.csv has no prompts"),
        ("a.csv", b"prompt\n\xff\n", r"a.csv is not UTF-8 \(byte 7 is 0xff\)"),
        ("a.json", "[", "a.json is not JSON: Expecting value"),
        ("a.json", "[" * 100_000, "a.json is not JSON: maximum recursion"),
        ("a.json", '{"text": "a"}', "neither a list of rows nor an object of lists of one length, of which one is prompt"),
        ("a.json", '{"prompt": ["a"], "id": [1, 2]}', "neither a list of rows nor an object of lists of one length"),
        ("a.json", "[]", "a.json has no prompts"),
        ("a.txt.gz", "no gzip", r"a.txt.gz cannot be read \(Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], r"a.jsonl.gz cannot be read \(Compressed file ended"),
        ("a.parquet", "x", "a.parquet is a file, but its name does not end in .txt, .jsonl, .csv, .json or .gz of these: rename"),
        ("notes", "x", "notes is a file, but its name does not end in .txt"),
        ("a.gz", "x", "a.gz is a file, but its name does not end in .txt"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused_by_name(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(write(tmp_path, name, content))


@each("data", [".", "~", "folder", "folder.jsonl"])
def test_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "folder.jsonl"):
        (tmp_path / name).mkdir()
    with pytest.raises(
        UserError, match=r"predict.data=.* cannot be read \(it is a folder\): give a file that ends in .txt"
    ):
        read_prompts(data)


def test_an_empty_value_is_refused() -> None:
    with pytest.raises(UserError, match="predict.data is empty: give a prompt"):
        read_prompts("")


@pytest.mark.long
@each("name", ["a.csv", "a.jsonl.gz"])
def test_rows_are_read_as_they_are_taken(tmp_path: Path, name: str) -> None:
    """Of 10 MB at most 1 MB is in memory at once."""
    rows = ["prompt"] if name == "a.csv" else []
    rows += [json.dumps({"prompt": "x" * 5000}) if "json" in name else "x" * 5000] * 2000
    content = "".join(f"{row}\n" for row in rows).encode()
    path = write(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    tracemalloc.start()
    assert sum(row.prompt is not None for row in read_prompts(path)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# Standard input


def test_stdin_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = read_stdin(monkeypatch, b"\xef\xbb\xbf\r\na\\nb\r\n[1]\n")
    assert texts(prompts) == ["a\nb", "[1]"]
    assert prompts.num_blank_lines == 1


@each("first", ['{"prompt": "a"}', '\n{"prompt": "a"}', '{"src": "a"}'])
def test_stdin_as_jsonl(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    rows = list(read_stdin(monkeypatch, f'{first}\n{{"id": 3, "prompt_token_ids": [1]}}\n{{\n'))
    assert rows[:2] == [PromptRow(0, prompt="a"), PromptRow(1, 3, prompt_token_ids=[1])]
    assert rows[2].error is not None


@each("line", ['{"a": 1}', "{", '"prompt"', "[" * 100_000, "1" * 5000])
def test_stdin_whose_first_line_is_not_a_row_is_text(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert texts(read_stdin(monkeypatch, f'{line}\n{{"prompt": "a"}}\n')) == [line, '{"prompt": "a"}']


@each(("content", "message"), [(b"", "standard input has no prompts"), (b"\xff", "standard input is not UTF-8")])
def test_bad_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_stdin(monkeypatch, content)


# Values from a caller


def rows(prompts: object) -> list[PromptRow]:
    return list(rows_from_python(prompts))


def test_python_prompts_and_their_errors() -> None:
    assert rows("nope.txt") == [PromptRow(0, prompt="nope.txt")]
    assert rows(["a", {"prompt_token_ids": [1], "id": 2}]) == [
        PromptRow(0, prompt="a"),
        PromptRow(1, 2, prompt_token_ids=[1]),
    ]
    errors = [row.error for row in rows([3, {"prompt": "a", "b": 1}, {}])]
    assert [str(error)[:15] for error in errors] == ["of type int: gi", "unknown fields ", "the row has non"]

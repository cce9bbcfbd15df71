"""`task=predict` writes OpenAI's batch output: the same lines as the server's batches, also after an interruption."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.builders import REPOSITORY
from tests.helpers.command import run
from tests.helpers.server import ended, served
from tests.helpers.soft_prefixes import write_paddle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DECODE = ("decode.max_new_tokens=5", "decode.temperature=0.7", "decode.seed=1", "device=cpu")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}


def line(id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def chat(id: str, content: str, **body: Any) -> dict[str, Any]:
    return line(id, CHAT, messages=[{"role": "user", "content": content}], **body)


LINES = [
    chat("你", "Who?", max_tokens=6, temperature=0),
    chat("n", "What is it?", n=2, seed=3, logprobs=True, top_logprobs=2),
    chat("rest", "How?", stop=["a", "e"], temperature=0, max_completion_tokens=40),
    chat("json", "Why so?", response_format=SCHEMA, max_tokens=9),
    chat("wrong", "x", max_token=6),
    chat("many", "Once " * 2000),
    chat("long", "y", max_tokens=5000),
    chat("beams", "z", temperature=0.5, use_beam_search=True, n=2, top_k=2),
    line("text", COMPLETIONS, prompt="One day", max_tokens=4, n=2, logprobs=1),
    line("ids", COMPLETIONS, prompt=[5, 6, 7], prompt_logprobs=1),
    line("range", COMPLETIONS, prompt=[5, 999999]),
    line("behind", COMPLETIONS, model="story", prompt="One day", max_tokens=4, n=2, logprobs=1),
    line("bias", COMPLETIONS, prompt="Tom", logit_bias={"999999": 1}),
]


def write(lines: list[dict[str, Any]], file: Path) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def read(text: str) -> dict[str, Any]:
    """Return the lines by their custom_id, without the fields that differ in each answer."""
    answers = {answer["custom_id"]: answer for answer in map(json.loads, text.splitlines())}
    for answer in answers.values():
        assert answer.pop("id")
        assert answer["response"].pop("request_id")
        for name in ("id", "created"):
            assert answer["response"]["body"].pop(name, True)
    return answers


def predict(data: Path, folder: Path, *overrides: str) -> None:
    done = run(*DECODE, f"predict.data={data}", f"hydra.run.dir={folder}", *overrides)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_lines_match_the_servers_batches(tmp_path: Path) -> None:
    files: dict[str, dict[str, Any]] = {"output": {}, "error": {}}
    write_paddle(tmp_path / "story.npy", 5, num_layers=4, channels=64)
    prefixes = f"model.prefixes={{story:{tmp_path / 'story.npy'}}}"
    serve_options = (*DECODE, f"serve.batches={tmp_path / 'batches'}")
    with served(tmp_path / "server", prefixes, *serve_options) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for endpoint in (CHAT, COMPLETIONS):
            lines = write([line for line in LINES if line["url"] == endpoint], tmp_path / "lines.jsonl")
            file = client.files.create(file=lines, purpose="batch")
            asked: Any = {"endpoint": endpoint, "completion_window": "24h"}
            batch = client.batches.create(input_file_id=file.id, **asked)
            while batch.status != "completed":
                batch = client.batches.retrieve(batch.id)
            for name, answers in files.items():
                file_id = getattr(batch, f"{name}_file_id")
                answers |= read(client.files.content(file_id).text)
        assert ended(process) == (0, "")
    predict(write(LINES, tmp_path / "all.jsonl"), tmp_path / "out", prefixes)
    for name, expected in files.items():
        text = (tmp_path / "out" / f"batch_{name}.jsonl").read_text()
        assert read(text) == expected
        order = [line["custom_id"] for line in LINES if line["custom_id"] in expected]
        assert [json.loads(answer)["custom_id"] for answer in text.splitlines()] == order
    assert set(files["output"]) == {"你", "n", "rest", "json", "text", "ids", "behind"}
    rows = [json.loads(row) for row in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [row["id"] in files["output"] for row in rows]
    first = next(row for row in rows if row["id"] == "text")
    said = files["output"]["text"]["response"]["body"]["choices"]
    assert [one["text"] for one in first["completions"]] == [one["text"] for one in said]
    behind = files["output"]["behind"]["response"]["body"]["choices"]
    assert [one["logprobs"] for one in behind] != [one["logprobs"] for one in said]


@pytest.mark.long
def test_a_job_that_was_ended_has_each_line_once(tmp_path: Path) -> None:
    lines = [line(str(i), COMPLETIONS, prompt=f"{i} birds", n=1 + i % 2) for i in range(6)]
    lines.insert(2, line("wrong", COMPLETIONS, prompt="a", nope=1))
    data = write(lines, tmp_path / "lines.jsonl")
    predict(data, tmp_path / "whole")
    code = (
        "import sys\n"
        "from pipelines.jobs.journal import Journal\n"
        "from tests.helpers.kill import before\n"
        "before(Journal, 'append', 4)\n"
        "from run import main\n"
        f"sys.argv = ['run.py', *{[*DECODE, f'predict.data={data}', f'hydra.run.dir={tmp_path / chr(111)}']!r}, 'predict.batch_size=2']\n"
        "main()\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=os.environ, capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "o" / "batch_output.jsonl").exists()
    predict(data, tmp_path / "o")
    for name in ("batch_output.jsonl", "batch_error.jsonl"):
        resumed, uninterrupted = ((tmp_path / folder / name).read_text() for folder in ("o", "whole"))
        assert read(resumed) == read(uninterrupted)
        ids = [json.loads(answer)["id"] for answer in resumed.splitlines()]
        assert ids == [json.loads(answer)["id"] for answer in uninterrupted.splitlines()]
        assert len(set(ids)) == len(ids) == (6 if name == "batch_output.jsonl" else 1)


def test_other_rows_have_no_such_file(tmp_path: Path) -> None:
    predict(write([{"prompt": "a"}], tmp_path / "rows.jsonl"), tmp_path / "out")
    assert not [*(tmp_path / "out").glob("batch_*")]

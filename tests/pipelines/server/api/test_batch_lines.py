"""Lines of OpenAI's batches are rows: their settings equal those of the same rows, and unsupported fields are refused
by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.errors import UserError
from pipelines.jobs.prompts import parse_row
from pipelines.server.api.batch_lines import row_of
from pipelines.tasks.row_tasks import read_batch_line
from tests.helpers.cases import each
from tests.helpers.command import run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(url: str = CHAT, id: object = "a", method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": method, "url": url, "body": {"model": "tiny", **body}}


USER = {"messages": [{"role": "user", "content": "Who?"}]}


def test_a_line_is_the_row_of_its_body() -> None:
    settings = {
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": -1,
        "stop": "x",
        "logprobs": True,
        "top_logprobs": 2,
        "n": 3,
        "thinking_token_budget": 0,
    }
    decode = {"max_new_tokens": 7, "temperature": 0.5, "seed": 2**64 - 1, "stop": ["x"], "logprobs": 2, "n": 3}
    decode |= {"thinking": {"max_tokens": 0}}
    assert row_of(line(**USER, **settings))[0] == {"id": "a", "decode": decode, **USER}
    assert row_of(line(COMPLETIONS, prompt="Once", top_k=-1))[0] == {
        "id": "a",
        "decode": {"top_k": 0},
        "prompt": "Once",
    }
    assert row_of(line(COMPLETIONS, prompt=[5, 6]))[0]["prompt_token_ids"] == [5, 6]


@each(
    ("wrong", "message"),
    [
        (
            line("/v1/embeddings", input="x"),
            "has POST /v1/embeddings, which is not supported: give POST /v1/chat/completions and POST /v1/comp",
        ),
        (line(method="GET", **USER), "has GET /v1/chat/completions"),
        (line(**USER) | {"url": 5}, "has POST 5"),
        (line(**USER) | {"priority": 1}, "has custom_id, method, url and body, not priority"),
        (line(), "body: messages"),
        (line(**USER, max_token=5), "body: max_token"),
        (line(**USER, stream=True), "body: stream is not used by rows: rows are written whole"),
        (line(**USER, tools=[{"type": "function", "function": {"name": "f"}}]), "body: tools is not used by rows"),
        (line(COMPLETIONS, prompt=["a", "b"]), "body: 2 prompts are in one line: give each prompt its own line"),
        (line(COMPLETIONS, prompt="a", echo=True), "body: echo is not used by rows: give prompt_logprobs"),
    ],
)
def test_an_invalid_row_is_its_own_error(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        row_of(wrong)
    row = parse_row(3, wrong, read_batch_line)
    assert row.id == "a"
    assert message in (row.error or "")


@each("id", [["a"], True, 1.5])
def test_an_id_is_a_text_or_a_number(id: object) -> None:
    assert "is neither a text nor a number" in (parse_row(0, line(id=id, **USER), read_batch_line).error or "")


@pytest.mark.long
def test_a_batch_is_predicted_as_its_rows_are(tmp_path: Path) -> None:
    lines = [
        line(id="你", **USER, max_tokens=6, temperature=0),
        line(id="b", **USER, max_token=6),
        line(COMPLETIONS, id="c", prompt="Once upon", max_tokens=4, temperature=1, seed=3, n=2),
        line(COMPLETIONS, id="d", prompt="Once upon"),
    ]
    rows = [
        {"id": "你", **USER, "decode": {"max_new_tokens": 6, "temperature": 0}},
        {"id": "b", "error": "x"},
        {"id": "c", "prompt": "Once upon", "decode": {"max_new_tokens": 4, "temperature": 1, "seed": 3, "n": 2}},
        {"id": "d", "prompt": "Once upon"},
    ]
    said = {}
    for name, content in (("batch", lines), ("rows", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in content))
        done = run(
            "device=cpu",
            "decode.max_new_tokens=5",
            f"predict.data={tmp_path / name}.jsonl",
            "decode.seed=1",
            f"hydra.run.dir={tmp_path / name}",
        )
        assert done.returncode == 0, done.stderr
        said[name] = [json.loads(row) for row in (tmp_path / name / "predictions.jsonl").read_text().splitlines()]
    assert "body: max_token" in said["batch"][1]["error"]
    assert [row for row in said["batch"] if not row["error"]] == [row for row in said["rows"] if not row["error"]]
    metrics = json.loads((tmp_path / "batch" / "metrics.json").read_text())
    assert (metrics["num_errors"], metrics["unused_fields"]) == (1, ["body.model"])

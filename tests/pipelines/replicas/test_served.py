"""task=serve with two replicas, over HTTP. Real processes."""

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.processes import engines
from tests.helpers.server import ended, served
from tests.helpers.waiting import LIMIT_S, until

pytestmark = [pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"), pytest.mark.long]

BODY = {"model": "tiny", "temperature": 0, "max_tokens": 8, "prompt": [300 + i for i in range(64)]}
ENDLESS = BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY | fields, timeout=LIMIT_S)


def events(lines: Iterator[str]) -> list[Any]:
    """Return the events of a stream until it ends; None is its [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [None if text == "[DONE]" else json.loads(text) for text in data]


def restarts(url: str) -> str:
    (line,) = [
        line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("quintet:engine_restarts")
    ]
    return line.split()[-1]


def test_two_replicas_behind_one_address(tmp_path: Path) -> None:
    limits = ["serve.batch_size=1", "serve.max_waiting=0", "serve.replicas=2"]
    with served(tmp_path / "run", *limits) as (process, url):
        assert len(engines()) == 2
        first, again = post(url).json(), post(url).json()
        assert (first["choices"], first["system_fingerprint"]) == (again["choices"], again["system_fingerprint"])
        cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, again)]
        assert cached == [0, 48]  # three whole blocks, and the last token is always computed
        with ExitStack() as stack:
            opened = [httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=LIMIT_S) for _ in range(2)]
            streams = [stack.enter_context(stream).iter_lines() for stream in opened]
            assert [next(lines).startswith("data: {") for lines in streams] == [True, True]  # each replica has one
            refused = post(url)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) > 0
            os.kill(next(iter(engines().values())), signal.SIGKILL)
            ends = sorted((events(lines)[-2:] for lines in streams), key=lambda end: end[-1] is None)
        assert "lost its worker of Ray: send the request again" in ends[0][-1]["error"]["message"]
        assert ends[1][-1] is None
        assert post(url).json()["choices"] == first["choices"]
        assert restarts(url) == "1.0"
        until(lambda: len(engines()) == 2)  # the other replica's Ray worker ends later
        left = [os.pidfd_open(pid) for pid in engines()]
        assert ended(process)[0] == 0
    for process_id in left:
        assert select.select([process_id], [], [], LIMIT_S)[0]  # the process has ended
        os.close(process_id)


def test_a_batch_continues_where_a_replica_is_killed(tmp_path: Path) -> None:
    """Each line is answered once, with the answer of a single replica."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": fields | {"prompt": [i % 500 + 3, 9]}}
        for i in range(250)
    ]
    with served(tmp_path / "run", f"serve.batches={tmp_path / 'batches'}", "serve.replicas=2") as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            file = client.files.create(file=("input.jsonl", content), purpose="batch")
            asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
            batch = client.batches.create(input_file_id=file.id, **asked)
            while (num_done := num_completed(client.batches.retrieve(batch.id))) < 50:
                time.sleep(0.01)
            assert num_done < len(lines)
            os.kill(next(iter(engines().values())), signal.SIGKILL)
            while (batch := client.batches.retrieve(batch.id)).status != "completed":
                time.sleep(0.05)
            assert (batch.error_file_id, num_completed(batch)) == (None, len(lines))
            assert batch.output_file_id is not None
            answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert restarts(url) == "1.0"
        assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(len(lines))]
        for number in (0, 100, 249):
            alone = httpx.post(f"{url}/v1/completions", json=lines[number]["body"], timeout=LIMIT_S).json()
            assert answers[number]["response"]["body"]["choices"] == alone["choices"]
        assert ended(process)[0] == 0


def num_completed(batch: Any) -> int:
    return batch.request_counts.completed if batch.request_counts else 0

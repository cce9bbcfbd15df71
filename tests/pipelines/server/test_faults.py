"""Clients that disconnect, a killed engine, and signals while streams run. Real processes over HTTP."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.cases import each
from tests.helpers.clients import PROMPT
from tests.helpers.processes import engines
from tests.helpers.server import ended, served
from tests.helpers.waiting import LIMIT_S, until

BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
ENDLESS = BODY | {"max_tokens": 900, "temperature": 1, "n": 8, "seed": 1, "ignore_eos": True, "stream": True}


@contextmanager
def begun(url: str, number: int = 1, **fields: Any) -> Iterator[list[Iterator[str]]]:
    """Return the lines of long streams, each of which has begun."""
    body = ENDLESS | fields
    with ExitStack() as stack:
        opened = [httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) for _ in range(number)]
        streams = [stack.enter_context(stream).iter_lines() for stream in opened]
        assert all(next(lines).startswith("data: {") for lines in streams)
        yield streams


def data_of(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def metrics(url: str) -> dict[str, float]:
    """Return the values of all metrics by their names, including labels except the model's."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0].replace('model_name="tiny"', ""): float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.long
def test_clients_that_leave_free_what_they_had(tmp_path: Path) -> None:
    """Long before their answers would have ended."""
    with served(tmp_path / "run") as (_, url):
        with begun(url, 3):
            pass
        cancelled = 'quintet:cancelled_total{,why="disconnected"}'
        until(lambda: metrics(url).get(cancelled) == 3)

        def is_idle() -> bool:
            now = metrics(url)
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return not any(now[f"vllm:{name}{{}}"] for name in names)

        until(is_idle)
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=LIMIT_S).status_code == 200
        assert metrics(url)["vllm:generation_tokens_total{}"] == 8  # of the stream that ended
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert [(line["status"], line["finish"]) for line in lines] == [(200, ["disconnected"])] * 3 + [(200, ["length"])]
    assert PROMPT not in (tmp_path / "run" / "requests.jsonl").read_text()


@pytest.mark.long
def test_the_listener_outlives_a_killed_engine(tmp_path: Path) -> None:
    with served(tmp_path / "run") as (process, url):
        before = httpx.post(f"{url}/v1/completions", json=BODY, timeout=LIMIT_S).json()
        with begun(url) as (stream,):
            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)
            last = json.loads(data_of(stream)[-1])
        assert last["error"]["message"] == "the engine was ended by SIGKILL: send the request again"
        assert httpx.get(f"{url}/health").status_code == 200
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        after = httpx.post(f"{url}/v1/completions", json=BODY, timeout=LIMIT_S).json()
        for name in ("choices", "system_fingerprint"):
            assert after[name] == before[name]
        assert metrics(url)["quintet:engine_restarts_total{}"] == 1
        assert engine not in engines()
        assert ended(process)[0] == 0


@pytest.mark.long
@each("drain_s", [LIMIT_S, 0])
def test_a_server_that_ends_finishes_what_it_took_or_says_so(tmp_path: Path, drain_s: float) -> None:
    """Within drain_s streams end normally; later ones get an error."""
    with (
        served(tmp_path / "run", f"serve.drain_s={drain_s}") as (process, url),
        begun(url, 2, max_tokens=300 if drain_s else 900) as streams,
    ):
        process.send_signal(signal.SIGTERM)
        ends = [data_of(lines)[-2:] for lines in streams]
        if drain_s:
            assert [end[-1] for end in ends] == ["[DONE]"] * 2
            assert [json.loads(end[0])["choices"][0]["finish_reason"] for end in ends] == ["length"] * 2
        else:
            assert [json.loads(end[-1])["error"]["code"] for end in ends] == ["draining"] * 2
        assert process.wait(LIMIT_S) == 0

"""The commands of docs/serve.md work unchanged, except for ports and the folder of batches."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.builders import REPOSITORY
from tests.helpers.server import ended, served
from tests.helpers.waiting import LIMIT_S

PAGE = (REPOSITORY / "docs" / "serve.md").read_text(encoding="utf-8")
SERVE, REPLICAS, CURL, OPENAI, CHAT, BATCH, _ = re.findall(r"^```\n(.+?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the page's server."""
    folder = tmp_path_factory.mktemp("served")
    words = SERVE.split()
    assert words[:3] == [".venv/bin/python", "run.py", "task=serve"]
    options = [word for word in words[3:] if not word.startswith(("serve.port=", "serve.batches="))]
    with served(folder / "run", *options, f"serve.batches={folder / 'batches'}") as (process, url):
        yield url
        assert ended(process) == (0, "")


def output(command: str, url: str) -> str:
    assert "http://127.0.0.1:8000" in command
    done = subprocess.run(
        ["bash", "-c", command.replace("http://127.0.0.1:8000", url)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(url: str) -> None:
    events = re.findall(r"^data: (.+)$", output(CURL, url), re.MULTILINE)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] in ("stop", "length")


def test_openai(url: str) -> None:
    assert output(OPENAI, url).strip()


@pytest.mark.long
def test_batch(url: str) -> None:
    answers = [json.loads(line) for line in output(BATCH, url).splitlines() if line]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2"]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)


@pytest.mark.long
def test_chat_page(url: str, tmp_path: Path) -> None:
    command = f"exec {CHAT.strip()} chat.port=0 hydra.run.dir={tmp_path}".replace("http://127.0.0.1:8000", url)
    page = subprocess.Popen(["bash", "-c", command], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        match = None
        while match is None and (line := page.stdout.readline()):
            match = re.search(r"http://[\w.:]+", line)
        assert match
        assert "gradio" in httpx.get(match[0]).text
    finally:
        page.send_signal(signal.SIGINT)
        page.wait(LIMIT_S)


@pytest.mark.matrix  # tests/pipelines/replicas/test_served.py has such a server, too
def test_two_replicas(tmp_path: Path) -> None:
    words = REPLICAS.split()
    assert words[:3] == [".venv/bin/python", "run.py", "task=serve"]
    with served(tmp_path, *(word for word in words[3:] if not word.startswith("serve.port="))) as (process, url):
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
        assert ended(process)[0] == 0

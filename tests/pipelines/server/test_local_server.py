"""The server that a web page for conversations runs in its own process."""

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from conf.errors import UserError
from conf.schema import ModelConfig, Task
from conf.serving import ServeConfig
from pipelines.server.serve import local_server
from tests.helpers.builders import REPOSITORY
from tests.helpers.fork_server import true_starts
from tests.helpers.serving import tiny_run
from tests.helpers.waiting import LIMIT_S

RUN = replace(tiny_run(), task=Task.serve, serve=ServeConfig(port=0))


def test_it_answers_and_ends(tmp_path: Path) -> None:
    with local_server(RUN, tmp_path) as url:
        assert url.startswith("http://127.0.0.1:")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert httpx.post(f"{url}/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")
    assert [thread for thread in threading.enumerate() if thread.name == "server"] == []
    assert (tmp_path / "requests.jsonl").read_text().count("\n") == 1


@pytest.mark.long
def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    run = replace(RUN, model=ModelConfig(path=str(tmp_path), tokenizer=None))
    with pytest.raises(UserError, match="none"), local_server(run, tmp_path):
        pass
    assert [thread for thread in threading.enumerate() if thread.name == "server"] == []


@pytest.mark.long
@true_starts()
def test_the_page_of_a_run_has_its_model_and_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    command = [sys.executable, "run.py", "task=chat", "chat.web=true", "chat.port=0", "device=cpu"]
    command.append(f"hydra.run.dir={tmp_path / 'run'}")
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("the page is at http://127.0.0.1:")
            page = httpx.get(said.removeprefix("the page is at ").strip())
            assert (page.status_code, '"tiny"' in page.text) == (200, True)
            lists = Path(f"/proc/{process.pid}/task").glob("*/children")
            children = [int(child) for file in lists for child in file.read_text().split()]
            assert children  # the engine, and the process that renders templates
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children)

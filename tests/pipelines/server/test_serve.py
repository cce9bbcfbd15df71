"""The command task=serve: its port, its first line, its end. Real processes."""

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from conf.compose import compose_run_config
from conf.errors import UserError
from conf.serving import ServeConfig
from pipelines.server.serve import _bound
from tests.helpers.command import refusal, run
from tests.helpers.fork_server import true_starts
from tests.helpers.server import ended, served


@true_starts()
def test_it_serves_and_ends(tmp_path: Path) -> None:
    with served(tmp_path / "run") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("tiny", 1024)
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()  # only the engine's process imports it
        assert ended(process) == (0, "")
    files = {"config.yaml", "requests.jsonl", "run.lock", "run.log", "run.engine.log"}
    assert {file.name for file in (tmp_path / "run").iterdir()} == files
    (line,) = (tmp_path / "run" / "requests.jsonl").read_text().splitlines()
    assert (json.loads(line)["path"], json.loads(line)["status"]) == ("/v1/models", 200)


def test_connections_send_at_once() -> None:
    with _bound(ServeConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_busy_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("task=serve", f"serve.port={port}", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: serve.host=127.0.0.1 serve.port={port} cannot be listened on (Address already in use): "
        "give another port, or serve.port=0 for a free one\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    done = run(
        "task=serve", "serve.port=0", "device=cpu", f"model.path={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_options_that_cannot_be_served_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUINTET_API_KEYS", raising=False)
    for argument, message in {
        "serve.host=0.0.0.0": "serve.host=0.0.0.0 is open to other machines and there are no API keys",
        "serve.batches=/dev/null/a": "serve.batches=/dev/null/a cannot be used (Not a directory)",
        "serve.max_upload=1MB": "serve.max_upload=1MB needs serve.batches",
        "serve.adapter_folders=[/a]": "serve.adapter_folders needs keys of admins: give serve.admin_keys=FILE",
        "predict.data=-": "predict.data=- is not used by task=serve",
        "-m": "so it is no job of a sweep: leave out -m",
    }.items():
        assert message in refusal(tmp_path / "run", "task=serve", "serve.port=0", argument)


@pytest.mark.long
def test_the_decode_group_is_the_checkpoints() -> None:
    assert compose_run_config(["task=serve"]).decode.temperature is None
    assert compose_run_config(["task=serve", "decode=greedy"]).decode.temperature == 0
    assert compose_run_config(["decode=greedy"]).decode.temperature == 0
    assert compose_run_config(["task=serve", "model.adapters={fr:/adapters/fr}"]).model.adapters == {
        "fr": "/adapters/fr"
    }
    assert compose_run_config(["task=serve", "model.prefixes={a:/b}"]).model.prefixes == {"a": "/b"}
    with pytest.raises(UserError, match="model.prefixes.a is not allowed: an adapter has this name, give another one"):
        compose_run_config(["task=serve", "model.prefixes={a:/b}", "model.adapters={a:/c,b:/c}"])


@pytest.mark.long
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "run", "serve.drain_s=600") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as waiting:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
            waiting.sendall(head)  # the body does not come: this request is in progress
            assert httpx.get(f"{url}/ready").status_code == 200  # after the server has read that head
            process.send_signal(signal.SIGTERM)
            while httpx.get(f"{url}/ready").status_code == 200:
                pass  # of two pending signals the system delivers the lower number first
            assert ended(process, signal.SIGINT)[0] == 128 + signal.SIGINT

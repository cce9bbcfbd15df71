"""A job and a server on a Ray cluster, simulated by two node processes on this machine."""

import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.helpers.command import run, run_interrupted
from tests.helpers.server import ended, served
from tests.helpers.waiting import LIMIT_S

pytestmark = [pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"), pytest.mark.long]

RAY = Path(sys.executable).with_name("ray")
NODE = ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
HEAD = ["--head", "--port=0", "--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0"]


@contextmanager
def node(*arguments: str) -> Iterator[str]:
    """Start a node of a cluster, and return its output when it runs. It ends with the block, with its processes."""
    command = [str(RAY), "start", *arguments, *NODE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
    assert process.stdout is not None
    try:
        said = ""
        while "Ray runtime started" not in said or "--block" not in said:
            assert select.select([process.stdout], [], [], LIMIT_S)[0], said
            line = process.stdout.readline().decode()
            assert line, said
            said += line
        yield said
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address, for RAY_ADDRESS, of a cluster of two nodes with one processor each."""
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))  # socket paths must be short
        said = stack.enter_context(node(*HEAD, f"--temp-dir={folder}"))
        match = re.search(r"--address='([^']+)'", said)
        assert match, said
        stack.enter_context(node(f"--address={match[1]}", "--min-worker-port=0", "--max-worker-port=0"))
        patch.setenv("RAY_ADDRESS", match[1])
        yield match[1]


def test_a_killed_job_continues_where_it_was(cluster: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("".join(f"Once upon a time there were {i} dogs\n" for i in range(60)))
    settings = [f"predict.data={data}", "predict.batch_size=4", "decode=sampling", "decode.seed=3", "device=cpu"]
    settings.append("decode.max_new_tokens=6")
    single, folder = tmp_path / "single", tmp_path / "ray"
    assert run(*settings, f"hydra.run.dir={single}").returncode == 0
    command = [*settings, "parallel=ray", "parallel.replicas=2", f"hydra.run.dir={folder}"]
    assert run_interrupted(signal.SIGKILL, folder, 20, *command).returncode == -signal.SIGKILL
    assert not (folder / "predictions.jsonl").exists()
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "20 rows are done" in done.stderr
    assert (folder / "predictions.jsonl").read_bytes() == (single / "predictions.jsonl").read_bytes()


def test_a_server_has_its_replicas_there_and_no_other_without_the_token(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path / "run", "serve.replicas=2") as (process, url):
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert ended(process)[0] == 0
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("task=serve", "serve.port=0", "serve.replicas=2", f"hydra.run.dir={tmp_path / 'other'}")
    assert done.returncode == 1
    assert f"error: RAY_ADDRESS={cluster} cannot be reached (Token authentication is enabled" in done.stderr

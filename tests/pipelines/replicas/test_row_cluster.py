"""A job on a Ray cluster, which two node processes of this machine stand for: its process is killed, and the same command goes on."""

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

import pytest

from tests.helpers.command import run, run_interrupted
from tests.helpers.waiting import LIMIT_S

pytestmark = [pytest.mark.skipif(find_spec("ray") is None, reason="needs the package ray"), pytest.mark.long]

RAY = Path(sys.executable).with_name("ray")
NODE = ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
HEAD = ["--head", "--port=0", "--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0"]


@contextmanager
def node(*arguments: str) -> Iterator[str]:
    """What a node of a cluster has said when it runs. It ends with the block, and its processes with it."""
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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes with a processor each, where RAY_ADDRESS leads."""
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))  # sockets have short names
        said = stack.enter_context(node(*HEAD, f"--temp-dir={folder}"))
        found = re.search(r"--address='([^']+)'", said)
        assert found, said
        stack.enter_context(node(f"--address={found[1]}", "--min-worker-port=0", "--max-worker-port=0"))
        monkeypatch.setenv("RAY_ADDRESS", found[1])
        yield


def test_a_killed_job_goes_on_where_it_was(cluster: None, tmp_path: Path) -> None:
    data = tmp_path / "rows.txt"
    data.write_text("".join(f"Once upon a time there were {i} dogs\n" for i in range(60)))
    settings = [f"predict.data={data}", "predict.batch_size=4", "decode=sampling", "decode.seed=3", "device=cpu"]
    settings.append("decode.max_new_tokens=6")
    whole, folder = tmp_path / "single", tmp_path / "ray"
    assert run(*settings, f"hydra.run.dir={whole}").returncode == 0
    command = [*settings, "parallel=ray", "parallel.replicas=2", f"hydra.run.dir={folder}"]
    assert run_interrupted(signal.SIGKILL, folder, 20, *command).returncode == -signal.SIGKILL
    assert not (folder / "predictions.jsonl").exists()
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "20 rows are done" in done.stderr
    assert (folder / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()

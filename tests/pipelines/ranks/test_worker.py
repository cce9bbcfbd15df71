"""The process of another rank, without a model."""

import os
import socket
import subprocess
import sys

import pytest

from pipelines.loading import worker
from pipelines.ranks.launch import joined
from pipelines.ranks.messages import Channel, Gone
from pipelines.ranks.rendezvous import join, listen
from tests.helpers.builders import REPOSITORY
from tests.helpers.launchers import SRUN

SLOW = """
import atexit, socket, sys, time, types

from pipelines.loading import worker
from pipelines.ranks.messages import Channel, Gone


def run_worker(channel, start):
    assert channel.receive()[0] == {"op": "end"}
    raise Gone


sys.modules["pipelines.loading.rank_worker"] = types.SimpleNamespace(run_worker=run_worker)
atexit.register(time.sleep, 600)  # as where a large model is given back
atexit.register(print, "ends", flush=True)
worker.follow(Channel(socket.socket(fileno=int(sys.argv[1]))))
"""


def test_a_rank_that_ends_slowly_has_not_failed() -> None:
    """Rank 0 waits two seconds for it and then closes the socket. With another exit code a launcher would report the
    run as failed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", SLOW, str(theirs.fileno())]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[theirs.fileno()], **pipes) as process:  # type: ignore[call-overload]
        theirs.close()
        channel = Channel(ours)
        channel.send({"name": "rank 1", "cores": sorted(os.sched_getaffinity(0)), "num_gpus": 0})
        channel.send({"op": "end"})
        assert process.stdout.readline() == "ends\n"
        channel.close()
        assert process.wait(60) == 0


def test_rank_0_listens_before_anything_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has come is then told, and does not wait for a rank 0 that a mistyped setting has ended."""
    environment = SRUN | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not worker.followed()
    place = joined(environment)
    other = joined(environment | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert place is not None
    assert other is not None
    channel = join(other)
    listen(place).close()  # as if the process ends
    with pytest.raises(Gone):
        channel.receive()

"""The sockets between rank 0 and the other ranks: rank 0 ends when a rank is lost, whatever one of its threads waits
for."""

import subprocess
import sys

import pytest

from tests.helpers.builders import REPOSITORY

BEGIN = """
import fcntl, resource, socket, subprocess, sys, threading, time

from kernels.collectives import NO_NEIGHBOURS, Alone
from models.sharding import ParallelLayout
from pipelines.jobs.interrupt import RankLost
from pipelines.ranks.control import Worker, Workers
from pipelines.ranks.messages import LENGTHS, Channel
from pipelines.ranks.rank_context import RankContext

ours, theirs = socket.socketpair()
heartbeat_s, process = 30.0, None
"""
END = """
place = RankContext(ParallelLayout(), Alone(), NO_NEIGHBOURS, 1, ())
workers = Workers([Worker(1, "rank 1", Channel(ours), process)], place, heartbeat_s)
try:
    workers.answers(int)
except RankLost as error:
    print(error)
    workers.close()
    sys.exit(1)
"""


def said(event: str) -> str:
    """Return rank 0's message about an event before it waits for an answer. Rank 0 ends."""
    command = [sys.executable, "-c", BEGIN + event + END]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    return done.stdout


@pytest.mark.long
def test_no_thread_holds_a_process_that_has_lost_a_rank() -> None:
    """gloo waits 30 s for a rank that has come and was lost before it was reached."""
    assert said("threading.Thread(target=time.sleep, args=(600,)).start(); theirs.close()") == "rank 1 has ended\n"


@pytest.mark.long
def test_a_rank_that_stops_within_a_message_is_silent() -> None:
    """For example by SIGSTOP while it sends logits, which a socket accepts only in parts."""
    part = "theirs.sendall(LENGTHS.pack(2, 1 << 20) + b'{}' + bytes(1000))"
    assert said(f"heartbeat_s = 1.0; {part}") == "rank 1 has been silent for 1 s\n"


@pytest.mark.long
def test_a_process_of_many_files_watches_over_its_ranks() -> None:
    """`select` does not support file descriptors from 1024 on."""
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    many = "ours = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1500))"
    assert said(f"{limit}; {many}; theirs.close()") == "rank 1 has ended\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("exit 3", "ended with exit code 3"),
        ("kill -TERM $$", "was ended by signal 15 (SIGTERM)"),
        ("kill -40 $$", "was ended by signal 40 (of real time)"),
    ],
)
def test_how_a_rank_has_ended(end: str, how: str) -> None:
    """A signal without a name would end the watching thread, and the run would wait forever."""
    assert said(f"process = subprocess.Popen(['bash', '-c', '{end}']); theirs.close()") == f"rank 1 {how}\n"

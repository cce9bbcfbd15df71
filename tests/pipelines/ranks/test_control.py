"""Rank 0 and the others' sockets: it ends with a lost rank, whatever a thread of it waits for."""

import subprocess
import sys

from tests.helpers.builders import REPOSITORY

HELD = """
import socket, sys, threading, time

from kernels.collectives import NO_NEIGHBOURS, Alone
from models.cuts import Division
from pipelines.interrupt import RankLost
from pipelines.ranks.control import Worker, Workers
from pipelines.ranks.messages import Channel
from pipelines.ranks.place import Place

ours, theirs = socket.socketpair()
place = Place(Division(), Alone(), NO_NEIGHBOURS, 1, ())
workers = Workers([Worker(1, "rank 1", Channel(ours), None)], place, 30.0)
threading.Thread(target=time.sleep, args=(600,)).start()
theirs.close()
try:
    workers.answers()
except RankLost as error:
    print(error)
    workers.close()
    sys.exit(1)
"""


def test_no_thread_holds_a_process_that_has_lost_a_rank() -> None:
    """As gloo does, which waits 30 s for a rank that has come and is lost before it was reached."""
    done = subprocess.run(
        [sys.executable, "-c", HELD], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "rank 1 has ended\n", "")

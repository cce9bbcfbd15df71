"""The engine's process: `python -m pipelines.replicas.engine_process FD`.

FD is the inherited end of a socketpair. The process ends when the other end is closed.
"""

import ctypes
import logging
import signal
import socket
import sys
from pathlib import Path

from conf.errors import UserError
from conf.support.terminal import log_warnings
from pipelines.jobs.interrupt import RankLost
from pipelines.jobs.run_log import log_engine_in
from pipelines.replicas.engine_process.channel import Channel
from pipelines.replicas.engine_process.frames import Start, Unready
from pipelines.replicas.engine_process.loading import load_served
from pipelines.replicas.engine_process.process import EngineProcess

PR_SET_PDEATHSIG = 1  # Linux prctl option


def main() -> None:
    """Load the model that the first frame names, and serve it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a hung process does not see that its socket closes
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent process decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    log_warnings()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    while not (frames := channel.receive(waits=True)):
        if frames is None:
            return
    start = frames[0]
    if not isinstance(start, Start):
        raise UserError("the first frame is not Start")
    if start.log_folder is not None:
        log_engine_in(Path(start.log_folder))
    try:
        served = load_served(start.run, channel)
    except (UserError, OSError) as error:
        channel.send_all(Unready(str(error)))
        return
    channel.send(served.ready)
    # Warnings about unused settings of a request concern its sender. They would fill the log.
    logging.getLogger("conf.decoding").setLevel(logging.ERROR)
    EngineProcess(channel, served, start.run.serve.max_step_ms).serve()


if __name__ == "__main__":
    try:
        main()
    except (UserError, RankLost) as error:
        sys.exit(f"error: {error}")

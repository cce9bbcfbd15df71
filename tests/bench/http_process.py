"""Processor time of the HTTP process for each chunk: `python tests/bench/http_process.py --out FILE.json [--streams 1 16
64] [--rounds 3] [key=value ...]`.

Starts task=serve of the given settings and reads streams of completions through bare sockets. A row has the processor
time of the HTTP process divided by the number of events, user and system apart, and the tokens per second of all
streams. Medians over rounds.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from pipelines.jobs.report import environment, write_atomically  # noqa: E402

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Row = dict[str, float]


def processor_time(pid: int) -> tuple[float, float]:
    """Return the user and system time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) * TICK_S, int(fields[12]) * TICK_S


def stream(port: int, number: int, new: int) -> int:
    """Read a streamed completion and return the number of its events."""
    body = {"prompt": [5 + number, 6, 7, 8], "max_tokens": new, "ignore_eos": True, "temperature": 0, "stream": True}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    answer = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        while received := connection.recv(1 << 16):
            answer += received
    assert b"[DONE]" in answer, answer[:500]
    return answer.count(b"data: ")


def measure(port: int, pid: int, streams: int, new: int) -> Row:
    """Return a row of `streams` concurrent streams."""
    with ThreadPoolExecutor(streams) as pool:
        before, start = processor_time(pid), time.monotonic()
        num_chunks = sum(pool.map(lambda number: stream(port, number, new), range(streams)))
        seconds, after = time.monotonic() - start, processor_time(pid)
    user, system = ((b - a) / num_chunks * 1e6 for a, b in zip(before, after, strict=True))
    return {
        "num_chunks": num_chunks,
        "user_us": round(user, 1),
        "system_us": round(system, 1),
        "us_per_chunk": round(user + system, 1),
        "tokens_per_s": round(streams * new / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=1000, help="tokens of a stream")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "run.py",
            "task=serve",
            f"serve.port={port}",
            f"hydra.run.dir={folder}",
            "device=cpu",
        ]
        command += [f"serve.batch_size={max(args.streams)}", *args.overrides]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready")
            measure(port, process.pid, max(args.streams), 20)  # the first requests initialise the server
            for streams in args.streams:
                measured = [measure(port, process.pid, streams, args.new) for _ in range(args.rounds)]
                rows[str(streams)] = {name: statistics.median(row[name] for row in measured) for name in measured[0]}
                print(streams, rows[str(streams)], flush=True)
        finally:
            process.terminate()
            process.wait()
    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    write_atomically(args.out, [json.dumps(about | {"overrides": args.overrides, "rows": rows}, indent=1) + "\n"])


if __name__ == "__main__":
    main()

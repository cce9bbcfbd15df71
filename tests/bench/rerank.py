"""Pairs per second of /rerank: `python tests/bench/rerank.py --out FILE.json [--documents 64] [--words 100]
[--rounds 3] [key=value ...]`.

Starts task=serve of the given settings and sends one request of many documents of random words. Documents of a round
are new, so the prefix cache knows only the template and the query. The row is the median over rounds.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from pipelines.jobs.report import environment, write_atomically  # noqa: E402

WORDS = "a cat sat on the mat and looked at seven dogs under an old tree near the river".split()


def ask(port: int, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def measure(port: int, seed: int, documents: int, words: int) -> dict[str, float]:
    """Return a row of one request."""
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=words)) for _ in range(documents)]
    start = time.monotonic()
    answer = ask(port, "/rerank", {"query": "Where did the cat sit?", "documents": texts})
    seconds = time.monotonic() - start
    num_tokens = answer["usage"]["prompt_tokens"]
    return {
        "pairs_per_s": documents / seconds,
        "tokens_per_pair": num_tokens / documents,
        "tokens_per_s": num_tokens / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = ["task=serve", f"serve.port={port}", f"hydra.run.dir={folder}", *args.overrides]
        server = subprocess.Popen(
            [sys.executable, "run.py", *settings], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            assert server.stdout.readline().startswith("ready")
            measure(port, 0, args.documents, args.words)  # warms up
            rows = [measure(port, 1 + i, args.documents, args.words) for i in range(args.rounds)]
        finally:
            server.terminate()
            server.wait()
    report = {
        "what": f"/rerank with {args.documents} documents of {args.words} words, medians of {args.rounds} requests",
        "date": date.today().isoformat(),
        "settings": args.overrides,
        "environment": environment(),
        "row": {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]},
        "pairs_per_s of each request": [round(row["pairs_per_s"], 2) for row in rows],
    }
    write_atomically(args.out, [json.dumps(report, indent=2) + "\n"])
    print(json.dumps(report["row"]))


if __name__ == "__main__":
    main()

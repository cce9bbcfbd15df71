"""A long run of the server under faults: `python tests/bench/serve_soak.py --minutes 30 --out FILE.json [key=value
...]`.

Phases follow each other until the time is over: calm, disconnects, slow readers, long prompts, rows of NaN, a full
disk, SIGSTOP and kill -9 of the engine's process. Workers send requests all the time, and each answer must equal the
answer from before the faults; dropped streams are resumed with Last-Event-ID. After each phase every line of every
batch must exist exactly once, nothing may run or hold blocks, and the memory and descriptors of both processes are
recorded. The exit code is 1 if a check fails. Overrides: as for run.py.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import httpx  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from tests.helpers.server import ready_url, start_server  # noqa: E402

TINY = REPOSITORY / "models" / "tiny"
NUM_BODIES = 24
NUM_WORKERS = 6
SECONDS = 5.0  # minimum duration of a phase's fault and its workers
SETTLE_S = 120.0
STALL_S = 5.0
SEND_TIMEOUT_S = 5.0
MEGABYTE = 2**20
JSON_TYPE = {"content-type": "application/json"}
Body = dict[str, Any]


class Failed(Exception):
    """A check of the soak did not hold."""


class Server:
    """The server's two processes, observed from outside."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder = folder
        settings = [f"serve.stall_s={STALL_S}", f"serve.send_timeout_s={SEND_TIMEOUT_S}", "serve.batch_size=16"]
        settings += [f"serve.batches={folder / 'batches'}", f"model.adapters={{broken: {write_broken(folder)}}}"]
        self._log = open(folder / "log.txt", "w")  # noqa: SIM115
        self.process = start_server(folder / "run", *settings, *overrides, stderr=self._log)
        url = ready_url(self.process)
        if url is None:
            raise Failed(f"the server does not start: {(folder / 'log.txt').read_text()[-2000:]}")
        self.url = f"{url}/v1"

    @property
    def child(self) -> int | None:
        """Return the id of the engine's process, or None if there is none."""
        for pid in map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()):
            if b"pipelines.replicas.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    def usage(self) -> dict[str, dict[str, int]]:
        """Return resident bytes and open descriptors of both processes."""
        pids = {"http": self.process.pid, "engine": self.child}
        return {name: usage_of(pid) for name, pid in pids.items() if pid is not None}

    def stop(self) -> int:
        """End the server with SIGTERM and return its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._log.close()


def usage_of(pid: int) -> dict[str, int]:
    resident = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return {"rss": int(resident[1]) * 1024 if resident else 0, "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


def write_broken(folder: Path) -> Path:
    """Write an adapter with finite factors whose products overflow, so that the logits of rows with this adapter are
    NaN."""
    config = json.loads((TINY / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    adapter = folder / "broken"
    adapter.mkdir()
    factors = {
        "A": torch.full((1, hidden), 1e30),
        "B": torch.full((config.get("head_dim", hidden // heads) * heads, 1), 1e30),
    }
    save_file({name.format(part): factor for part, factor in factors.items()}, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return adapter


class Soak:
    """The workers, the faults and the counters."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.http = httpx.AsyncClient(base_url=server.url, timeout=120)
        self.counts: Counter[str] = Counter()
        self.batches: list[str] = []
        self._random = random.Random(0)
        starts = ("Once upon a time", "One sunny day,", "I love Beijing, because", "A horse is")
        self._bodies: list[Body] = [
            {
                "model": "tiny",
                "prompt": f"{starts[i % 4]} {i}",
                "max_tokens": 16 + 8 * (i % 6),
                "temperature": 1,
                "seed": i,
            }
            | {"ignore_eos": True}
            for i in range(NUM_BODIES)
        ]
        self._expected: list[str] = []

    async def learn(self) -> None:
        """Record the text of each body's answer, one after the other, before any fault."""
        for body in self._bodies:
            answer = await self.http.post("/completions", json=body)
            self._expected.append(answer.raise_for_status().json()["choices"][0]["text"])

    async def work(self, until: float) -> None:
        """Send requests repeatedly, whole and streamed, and compare the answers."""
        while time.monotonic() < until:
            index = self._random.randrange(NUM_BODIES)
            streams = self._random.random() < 0.7
            text = await (self._streamed if streams else self._whole)(self._bodies[index])
            self.counts["answers"] += 1
            if text != self._expected[index]:
                raise Failed(f"body {index} gave {text!r} instead of {self._expected[index]!r}")

    async def _whole(self, body: Body) -> str:
        while True:
            answer = await self.http.post("/completions", json=body)
            if answer.status_code == 200:
                return str(answer.json()["choices"][0]["text"])
            await self._wait(answer)

    async def _streamed(self, body: Body) -> str:
        """Return the text of a stream. It is resumed after each drop."""
        text, place = "", ""
        while True:
            headers = {"last-event-id": place}
            async with self.http.stream(
                "POST", "/completions", json=body | {"stream": True}, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    await self._wait(answer)
                    continue
                async for id, data in events(answer):
                    if data == "[DONE]":
                        return text
                    chunk = json.loads(data)
                    if "error" in chunk:
                        break
                    place = id or place
                    text += chunk["choices"][0]["text"]
            self.counts["resumed streams"] += 1

    async def _wait(self, answer: httpx.Response) -> None:
        """Wait as long as an overloaded or loading server requests. Raises Failed for any other refusal."""
        error = answer.json()["error"]
        self.counts[f"status {answer.status_code} {error['code']}: {error['message'][:100]}"] += 1
        if answer.status_code not in (429, 500, 503):
            raise Failed(f"{answer.status_code}: {answer.text[:500]}")
        await asyncio.sleep(min(2.0, float(answer.headers.get("retry-after", 0.2))))

    async def calm(self) -> None:
        """Do nothing."""

    async def disconnects(self) -> None:
        """Drop streams after their first event."""

        async def leave() -> None:
            body = self._random.choice(self._bodies) | {"max_tokens": 500, "stream": True}
            async with self.http.stream("POST", "/completions", json=body) as answer:
                async for _ in events(answer):
                    break
            self.counts["disconnects"] += 1

        for _ in range(10):
            await asyncio.gather(*(leave() for _ in range(4)))

    async def slow_readers(self) -> None:
        """Request long streams and read none of them until the server closes the connection."""
        host, port = httpx.URL(self.server.url).host, httpx.URL(self.server.url).port
        readers = []
        for number in range(4):
            content = json.dumps(
                self._bodies[number] | {"max_tokens": 900, "n": 8, "stream": True, "logprobs": 20}
            ).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(content)}\r\n\r\n"
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await asyncio.get_running_loop().sock_connect(reader, (host, port))
            await asyncio.get_running_loop().sock_sendall(reader, head.encode() + content)
            readers.append(reader)
        await asyncio.sleep(SECONDS + SEND_TIMEOUT_S)
        for reader in readers:
            reader.close()
        self.counts["slow readers"] += len(readers)

    async def long_prompts(self) -> None:
        """Send prompts of 1 MB, which are too long, and bodies above the size limit."""
        for size, allowed in ((MEGABYTE, (400, 429)), (6 * MEGABYTE, (413,))):
            for _ in range(3):
                content = json.dumps({"model": "tiny", "prompt": "once upon " * (size // 10)})
                answer = await self.http.post("/completions", content=content, headers=JSON_TYPE)
                if answer.status_code not in allowed:
                    raise Failed(f"{size} bytes were answered with {answer.status_code}")
                self.counts["long prompts"] += 1

    async def rows_of_nan(self) -> None:
        """Use the adapter whose rows are NaN: each request gets an error of its own."""
        for _ in range(10):
            body = self._random.choice(self._bodies) | {"model": "broken"}
            answer = await self.http.post("/completions", json=body)
            if answer.status_code == 200 or "finite" not in answer.text:
                raise Failed(f"a row of NaN was answered with {answer.status_code}: {answer.text[:300]}")
            self.counts["rows of NaN"] += 1

    async def full_disk(self) -> None:
        """Prevent the files of the HTTP process from growing for a while. Answers must continue."""
        pid = self.server.process.pid
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))
        try:
            before = self.counts["answers"]
            while self.counts["answers"] < before + 20:
                await asyncio.sleep(0.1)
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        self.counts["full disks"] += 1

    async def stopped_engine(self) -> None:
        """Send SIGSTOP to the engine's process, which the server then ends and restarts."""
        await self._end_engine(signal.SIGSTOP)

    async def killed_engine(self) -> None:
        """Send SIGKILL to the engine's process."""
        await self._end_engine(signal.SIGKILL)

    async def _end_engine(self, number: signal.Signals) -> None:
        await self.begin_batch()
        pid = self.server.child
        if pid is None:
            raise Failed("there is no engine to end")
        await asyncio.sleep(0.5)
        os.kill(pid, number)
        deadline = time.monotonic() + SETTLE_S
        while self.server.child in (None, pid) or (await self.http.get(f"{self._root}/ready")).status_code != 200:
            if time.monotonic() > deadline:
                raise Failed(f"no engine came back after {number.name}")
            await asyncio.sleep(0.2)
        self.counts[number.name] += 1

    @property
    def _root(self) -> str:
        return self.server.url.removesuffix("/v1")

    async def begin_batch(self) -> None:
        """Submit a batch of 30 lines."""
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body | {"seed": 1000 + i}}
            for i, body in enumerate((self._bodies * 2)[:30])
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        file = await self.http.post("/files", data={"purpose": "batch"}, files={"file": ("batch.jsonl", content)})
        made = {
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "input_file_id": file.raise_for_status().json()["id"],
        }
        self.batches.append((await self.http.post("/batches", json=made)).raise_for_status().json()["id"])

    async def check_batches(self) -> None:
        """Wait for the batches. Raises Failed if a line is missing, duplicated or an error."""
        while self.batches:
            id = self.batches.pop()
            deadline = time.monotonic() + 600
            while (batch := (await self.http.get(f"/batches/{id}")).json())["status"] != "completed":
                if time.monotonic() > deadline or batch["status"] in ("failed", "expired", "cancelled"):
                    raise Failed(f"a batch is {batch['status']}: {json.dumps(batch)[:500]}")
                await asyncio.sleep(0.5)
            output = (await self.http.get(f"/files/{batch['output_file_id']}/content")).text
            ids = sorted(int(json.loads(line)["custom_id"]) for line in output.splitlines())
            if ids != list(range(30)):
                raise Failed(f"a batch has the lines {ids}")
            self.counts["lines of batches"] += len(ids)

    async def metrics(self) -> dict[str, float]:
        """Return the server's metrics without labels."""
        text = (await self.http.get(f"{self._root}/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^([\w:]+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE)}

    async def settle(self) -> dict[str, float]:
        """Wait until nothing runs, waits or holds blocks. Raises Failed if this does not happen."""
        deadline = time.monotonic() + SETTLE_S
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while True:
            metrics = await self.metrics()
            if not any(metrics[name] for name in names):
                return metrics
            if time.monotonic() > deadline:
                raise Failed(f"{ {name: metrics[name] for name in names} } without a request")
            await asyncio.sleep(0.1)


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield the id and the data of each event until the connection ends or breaks."""
    id = ""
    try:
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                id = value
            elif name == "data":
                yield id, value
    except httpx.TransportError:
        return


async def run_phase(soak: Soak, fault: Callable[[], Awaitable[None]]) -> dict[str, Any]:
    """Run a fault with workers, and return the measurements after it."""
    start = time.monotonic()
    until = [start + SECONDS]
    stopping = asyncio.ensure_future(fault())
    workers = [asyncio.ensure_future(_work_beside(soak, stopping, until)) for _ in range(NUM_WORKERS)]
    try:
        await asyncio.gather(stopping, *workers)
    finally:
        for task in (stopping, *workers):
            task.cancel()
    await soak.check_batches()  # a line that was in two crashes is rejected, as intended
    metrics = await soak.settle()
    row = {"phase": fault.__name__, "seconds": round(time.monotonic() - start, 1), **soak.server.usage()}
    return row | {"engine_restarts": metrics["quintet:engine_restarts_total"]}


async def _work_beside(soak: Soak, fault: "asyncio.Future[None]", until: list[float]) -> None:
    while not fault.done() or time.monotonic() < until[0]:
        await soak.work(time.monotonic() + 0.2)


async def run_soak(server: Server, minutes: float) -> dict[str, Any]:
    soak = Soak(server)
    phases = [soak.calm, soak.disconnects, soak.slow_readers, soak.long_prompts, soak.rows_of_nan, soak.full_disk]
    phases += [soak.stopped_engine, soak.killed_engine]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    start = time.monotonic()
    try:
        await soak.learn()
        while not rows or time.monotonic() < start + 60 * minutes:
            for fault in phases:
                rows.append(await run_phase(soak, fault))
                print(json.dumps(rows[-1]), flush=True)
    except (Failed, httpx.HTTPError) as error:
        failures.append(f"{type(error).__name__}: {error}")
    failures += leaks(rows)
    return {
        "minutes": round((time.monotonic() - start) / 60, 1),
        "counts": dict(soak.counts),
        "phases": rows,
        "failures": failures,
    }


def leaks(rows: list[dict[str, Any]]) -> list[str]:
    """Return the values that grew: for each phase, the median of the last third of the rounds compared with the second
    third."""
    problems = []
    num_phases = len({row["phase"] for row in rows}) or 1
    rounds = [rows[i : i + num_phases] for i in range(0, len(rows), num_phases)]
    third = len(rounds) // 3
    if not third:  # too short to decide
        return []
    for name in ("http", "engine"):
        for quantity, slack in (("rss", 1.05), ("descriptors", 1.0)):
            before, after = (
                statistics.median(row[name][quantity] for rows in part for row in rows if name in row)
                for part in (rounds[third : 2 * third], rounds[-third:])
            )
            if after > before * slack:
                problems.append(f"{quantity} of {name} grew from {before:.0f} to {after:.0f}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), args.overrides or ["model=tiny"])
        try:
            report = asyncio.run(run_soak(server, args.minutes))
        finally:
            code = server.stop()
            log = (Path(folder) / "log.txt").read_text()
    if code:
        report["failures"].append(f"SIGTERM ended the server with exit code {code}")
    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    lines = [json.dumps(row) for row in report.pop("phases")]
    content = json.dumps(about | {"overrides": args.overrides} | report, indent=1).removesuffix("\n}")
    write_atomically(args.out, [content, ',\n "phases": [\n  ', ",\n  ".join(lines), "\n ]\n}\n"])
    print(json.dumps({"counts": report["counts"], "failures": report["failures"]}), flush=True)
    if report["failures"]:
        sys.exit(f"{log[-3000:]}\nfailed: {'; '.join(report['failures'])}")


if __name__ == "__main__":
    main()

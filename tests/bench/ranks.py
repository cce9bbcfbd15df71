"""Ranks compared with one process: `python tests/bench/ranks.py --model FOLDER --out FILE.json [--rounds 3] [key=value
...]`.

gather: two processes concatenate pieces through our shared memory and through torch.distributed's gloo, in turns: the
median seconds per call, by the bytes of a piece. divisions: task=bench in one process with one thread per core and in
two ranks with half of the threads each, in turns, for one row and for sixteen, with the decode speed that parallel=auto
plans just before. A round in which the memory bandwidth changed is measured again. replicas: task=predict of --rows
rows in one process and with two replicas of parallel=ray, in turns. kill: the seconds from SIGKILL of a rank of
task=predict to the end of the run. `--only divisions` runs one of these measurements.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed

from conf.compose import compose_run_config
from kernels import build
from kernels.collectives.shared_memory import SharedMemory, create_shared_memory
from kernels.threads import use_cores
from pipelines.jobs.report import environment, write_atomically
from pipelines.loading.bandwidth import memory_bandwidth
from pipelines.loading.parallel_planner import plan_layouts
from pipelines.loading.topology import Topology

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = [1 << power for power in range(13, 26)]  # bytes of a piece: 8 KB to 32 MB
DIVISIONS = {
    "single": ["parallel=single"],
    "tp2": ["parallel=tp", "parallel.tp=2"],
    "pp2": ["parallel=pp", "parallel.pp=2"],
}
SPEEDS = ("prefill_tokens_per_s", "decode_tokens_per_s")
# tolerance of the memory bandwidth before and after each run of a round: two speeds differ more, repeated measurements
# less
STEADY = 0.25


def gather_rank(rank: int, fd: int, port: int, repeats: int, result: Connection) -> None:
    """Measure as one of two ranks, and send the medians of each size."""
    library = build.library()
    assert library is not None
    use_cores({sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    group = SharedMemory(library, fd, rank, 2, True)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rows = []
    for size in SIZES:
        num_rows = max(size >> 20, 1)  # the pieces of all ranks in a row have at most 4 MB
        piece = torch.full((num_rows, size // num_rows), rank, dtype=torch.uint8)
        pieces = [torch.empty_like(piece) for _ in range(2)]
        seconds: dict[str, list[float]] = {"shared_memory": [], "gloo": []}
        for _ in range(repeats):
            start = time.perf_counter()
            out = group.gather(piece, (piece.shape[1], piece.shape[1]))
            middle = time.perf_counter()
            torch.distributed.all_gather(pieces, piece)
            seconds["shared_memory"].append(middle - start)
            seconds["gloo"].append(time.perf_counter() - middle)
            torch.distributed.barrier()  # so that no variant includes the other's delay
        assert out.equal(torch.cat(pieces, dim=1))
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        microseconds = {f"{name}_us": round(median * 1e6, 1) for name, median in medians.items()}
        ratio = round(medians["gloo"] / medians["shared_memory"], 2)
        rows.append({"bytes": size, **microseconds, "gloo / shared_memory": ratio})
    group.check()
    result.send(rows)
    torch.distributed.destroy_process_group()


def gather(repeats: int) -> list[dict[str, Any]]:
    """Return the rows of all sizes, as rank 0 measures them."""
    library = build.library()
    assert library is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fd = create_shared_memory(library, 2)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=gather_rank, args=(i, fd, port, repeats, pipes[i][1])) for i in range(2)]
    for process in ranks:
        process.start()
    rows: list[dict[str, Any]] = pipes[0][0].recv()
    for process in ranks:
        process.join()
    return rows


def bench(model: str, overrides: list[str], num_rows: int, folder: Path) -> dict[str, float]:
    """Return the metrics of task=bench, and the memory bandwidth just after it."""
    command = [sys.executable, "run.py", "task=bench", f"model.path={model}", "device=cpu", f"hydra.run.dir={folder}"]
    command += [f"bench.batch_size={num_rows}", "bench.prompt_tokens=128", "bench.new_tokens=32", *overrides]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    metrics = json.loads((folder / "metrics.json").read_text())
    bandwidth = round(memory_bandwidth(torch.device("cpu")))
    return {name: round(metrics[name], 2) for name in SPEEDS} | {"memory_bandwidth_bytes_per_s": bandwidth}


def planned(model: str, overrides: list[str], num_rows: int) -> tuple[dict[str, float], Topology]:
    """Return the decode tokens/s that parallel=auto plans for each layout on this machine, in the units of `bench`, and
    the machine."""
    run = compose_run_config(
        ["task=bench", f"model.path={model}", "device=cpu", "parallel=auto", "model.max_length=160"]
        + [f"bench.batch_size={num_rows}", *overrides]
    )
    candidates, topology, _ = plan_layouts(run.model, run.quant, run.parallel, run.device, run.bench.batch_size)
    names = {(1, 1): "single", (2, 1): "tp2", (1, 2): "pp2"}
    return {names[candidate.tp, candidate.pp]: candidate.tokens_per_s for candidate in candidates}, topology


def one_round(model: str, overrides: list[str], num_rows: int, folder: Path) -> dict[str, Any]:
    """Return this machine as the planner measures it, and the planned and measured speeds of each layout."""
    plan, topology = planned(model, overrides, num_rows)
    flops = {rows: topology.flops(rows) for rows in {num_rows, -(-num_rows // 2)}}
    result: dict[str, Any] = {"machine": vars(topology) | {"link": vars(topology.link), "flops": flops}}
    for name, parallel in DIVISIONS.items():
        row = bench(model, [*parallel, *overrides], num_rows, folder / name)
        result[name] = row | {"planned_tokens_per_s": round(plan[name], 2)}
        print(name, num_rows, result[name], flush=True)
    return result


def is_steady(result: dict[str, Any]) -> bool:
    """Return whether the memory bandwidth was constant in a round. On shared machines it changes within seconds and
    decides the comparison."""
    speeds = [result["machine"]["bandwidth"], *(result[name]["memory_bandwidth_bytes_per_s"] for name in DIVISIONS)]
    return bool(max(speeds) <= (1 + STEADY) * min(speeds))


def parallel_layouts(model: str, overrides: list[str], rounds: int, folder: Path) -> dict[str, Any]:
    """Return the steady rounds by the number of rows, and the medians of each layout in them. At most twice as many
    rounds are measured."""
    result: dict[str, Any] = {}
    for num_rows in (1, 16):
        steady: list[dict[str, Any]] = []
        measured = 0
        while len(steady) < rounds and measured < 2 * rounds:
            this_round = one_round(model, overrides, num_rows, folder / f"{num_rows}-{measured}")
            measured += 1
            steady += [this_round] * is_steady(this_round)
        result[str(num_rows)] = {"rounds_measured": measured, "rounds": steady} | {
            name: summary(steady, name) for name in DIVISIONS if steady
        }
    return result


def summary(rounds: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the medians of a layout's speeds, and of their ratios to the plan and to one process in the same round."""
    rows, single = [result[name] for result in rounds], [result["single"] for result in rounds]
    ratios = [row["planned_tokens_per_s"] / row["decode_tokens_per_s"] for row in rows]
    medians = {speed: statistics.median(row[speed] for row in rows) for speed in SPEEDS}
    medians["planned / measured"] = statistics.median(ratios)
    for speed in SPEEDS:
        medians[f"{speed} / single"] = statistics.median(a[speed] / b[speed] for a, b in zip(rows, single, strict=True))
    return {key: round(value, 3) for key, value in medians.items()}


def replicas(model: str, overrides: list[str], num_rows: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the median speeds of a job in one process and with two replicas, and their ratio in the same round."""
    data = folder / "job.txt"
    data.write_text("\n".join(f"Row {i}" for i in range(num_rows)))
    speeds: dict[str, list[float]] = {"single": [], "replicas": []}
    for number in range(rounds):
        for name, parallel in (("single", ["parallel=single"]), ("replicas", ["parallel=ray", "parallel.replicas=2"])):
            run = folder / f"{name}-job-{number}"
            command = [sys.executable, "run.py", *parallel, f"model.path={model}", "device=cpu", *overrides]
            command += [f"predict.data={data}", "decode.max_new_tokens=32", "decode.ignore_eos=true"]
            command += ["decode.temperature=0", f"hydra.run.dir={run}"]
            subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
            speeds[name].append(json.loads((run / "metrics.json").read_text())["tokens_per_s"])
            print(name, num_rows, speeds[name][-1], flush=True)
    ratios = [both / single for both, single in zip(speeds["replicas"], speeds["single"], strict=True)]
    rows: dict[str, Any] = {
        f"{name}_tokens_per_s": round(statistics.median(values), 1) for name, values in speeds.items()
    }
    return {"num_rows": num_rows, **rows, "replicas / single": round(statistics.median(ratios), 3)}


def kill(model: str, overrides: list[str], rounds: int, folder: Path) -> list[float]:
    """Return the seconds from SIGKILL of rank 1 to the end of the run, in each round."""
    data, seconds = folder / "rows.txt", []
    data.write_text("\n".join(f"Row {i}" for i in range(64)))
    for number in range(rounds):
        run = folder / f"kill{number}"
        command = [
            sys.executable,
            "run.py",
            "parallel=tp",
            "parallel.tp=2",
            f"model.path={model}",
            "device=cpu",
            *overrides,
        ]
        command += [
            f"predict.data={data}",
            "decode.max_new_tokens=400",
            "decode.ignore_eos=true",
            f"hydra.run.dir={run}",
        ]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while not (workers := children(process.pid)) or not (run / "journal.jsonl").exists():
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[1])
            time.sleep(0.05)
        time.sleep(5)  # the rank is computing steps now
        start = time.perf_counter()
        os.kill(workers[0], signal.SIGKILL)
        _, stderr = process.communicate()
        seconds.append(round(time.perf_counter() - start, 2))
        assert process.returncode == 1, stderr
        print(seconds[-1], stderr.strip(), flush=True)
    return seconds


def children(pid: int) -> list[int]:
    """Return the ranks that a process has started."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"pipelines.loading.worker" in (process / "cmdline").read_bytes():
                pids.append(int(process.name))
        except OSError:  # the process has ended meanwhile
            continue
    return pids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=50, help="of each gather")
    parser.add_argument("--rows", type=int, default=64, help="of the job of two replicas")
    parser.add_argument("--only", choices=("gather", "divisions", "replicas", "kill_to_exit_s"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, overrides, folder = args.model, args.overrides, Path(name)
        parts: dict[str, Callable[[], Any]] = {
            "gather": lambda: gather(args.repeats),
            "divisions": lambda: parallel_layouts(model, overrides, args.rounds, folder),
            "replicas": lambda: replicas(model, overrides, args.rows, args.rounds, folder),
            "kill_to_exit_s": lambda: kill(model, overrides, args.rounds, folder),
        }
        result = {
            "what": (__doc__ or "").splitlines()[0],
            "date": str(date.today()),
            "environment": environment(),
            "model": Path(args.model).name,
            "rounds": args.rounds,
            "overrides": args.overrides,
        } | {part: measure() for part, measure in parts.items() if args.only in (None, part)}
    write_atomically(args.out, [json.dumps(result, indent=1)])


if __name__ == "__main__":
    main()

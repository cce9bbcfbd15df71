"""An exported model compared with its source: `python tests/bench/exported.py --model FOLDER --out FILE.json [--rounds
5] [key=value ...]`.

first_token_s: processes that end after the first token of a prompt of 16 ids. They run the packed model
(`model.keep_packed`), its export with run.py and with the C++ runner, and the models of --openvino FOLDER and --gguf
FILE with the Python packages of these tools (QUINTET_PEERS, ~/.cache/quintet-peers). decode and prefill: task=bench of
the model and of its export. All variants take turns; the results are medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from models.exported.runner.build import build_runner  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402

PEERS = Path(os.environ.get("QUINTET_PEERS", "~/.cache/quintet-peers")).expanduser()
PROMPT = list(range(5, 21))
OPENVINO = """
import sys, numpy, openvino, openvino_genai
ids = numpy.array([eval(sys.argv[2])], numpy.int64)
inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
config = openvino_genai.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.do_sample = 1, True, False
openvino_genai.LLMPipeline(sys.argv[1], "CPU").generate(inputs, config)
"""
LLAMA_CPP = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=int(sys.argv[3]), n_threads_batch=int(sys.argv[3]), verbose=False)
model.eval(eval(sys.argv[2]))
model.sample(temp=0.0)
"""


def run_py(*overrides: str) -> list[str]:
    return [sys.executable, "run.py", *overrides]


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    return time.perf_counter() - start


def bench(folder: Path, overrides: list[str]) -> dict[str, float]:
    seconds(run_py("task=bench", *overrides, f"hydra.run.dir={folder}"))
    metrics = json.loads((folder / "metrics.json").read_text())
    return {name: metrics[f"{name}_tokens_per_s"] for name in ("prefill", "decode")}


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the commands that compute a first token, by name."""
    data = folder / "prompt.jsonl"
    data.write_text(json.dumps({"prompt_token_ids": PROMPT}) + "\n")
    one = [f"predict.data={data}", "decode=greedy", "decode.max_new_tokens=1", f"hydra.run.dir={folder / 'run'}"]
    ids, cores = str(PROMPT), str(len(os.sched_getaffinity(0)))
    peers = {"openvino": (args.openvino, OPENVINO), "llama.cpp": (args.gguf, LLAMA_CPP)}
    return {
        "model, kept packed": run_py(*settings(args), "model.keep_packed=true", *one),
        "artefact": run_py(f"model.path={folder / 'exported'}", *one),
        "runner": [
            str(build_runner(folder / "runner")),
            str(folder / "exported"),
            "decode.max_new_tokens=1",
            *map(str, PROMPT),
        ],
        **{
            peer: [str(PEERS / f"venv-{peer}" / "bin" / "python"), "-c", code, str(path), ids, cores]
            for peer, (path, code) in peers.items()
            if path
        },
    }


def settings(args: argparse.Namespace) -> list[str]:
    return [f"model.path={args.model}", *args.overrides]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the medians of all rounds."""
    seconds(
        run_py(
            "task=export", *settings(args), f"export.output={folder / 'exported'}", f"hydra.run.dir={folder / 'export'}"
        )
    )
    starts = commands(args, folder)
    for command in starts.values():  # writes the packed model, and brings the files into the page cache
        seconds(command)
    first: dict[str, list[float]] = {name: [] for name in starts}
    speeds: dict[str, list[dict[str, float]]] = {"model": [], "artefact": []}
    for _ in range(args.rounds):
        for name, command in starts.items():
            first[name].append(seconds(command))
        speeds["model"].append(bench(folder / "model", settings(args)))
        speeds["artefact"].append(bench(folder / "bench", [f"model.path={folder / 'exported'}"]))
    pairs = list(zip(speeds["artefact"], speeds["model"], strict=True))
    return {
        "first_token_s": {name: round(statistics.median(times), 3) for name, times in first.items()},
        "tokens_per_s": {
            name: {phase: round(statistics.median(row[phase] for row in rows), 2) for phase in ("prefill", "decode")}
            for name, rows in speeds.items()
        },
        "artefact / model": {
            phase: round(statistics.median(ours[phase] / theirs[phase] for ours, theirs in pairs), 3)
            for phase in ("prefill", "decode")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = {
            "what": __doc__.splitlines()[0] if __doc__ else "",
            "date": date.today().isoformat(),
            "environment": environment(),
            "model": args.model.name,
            "overrides": args.overrides,
            "rounds": args.rounds,
            **measure(args, Path(folder)),
        }
    write_atomically(args.out, [json.dumps(report, indent=2), "\n"])
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

"""Speed on GGUF files, compared with llama.cpp on the same file, in new processes that take turns.

`python tests/bench/gguf_files.py --peer PYTHON models/tiny FILE.gguf --output REPORT.json`; PYTHON has llama-cpp-python,
built for this CPU. A folder is converted to GGUF first. With t(n) = seconds from a prompt of P tokens to its n-th new
token: prefill = P / t(1), decode = (N - 1) / (t(N) - t(1)), as task=bench counts. Quintet chooses each token and
decodes its text; llama.cpp gets the tokens and chooses none.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PEER = """
import json, random, statistics, sys, time
from importlib.metadata import version
import llama_cpp
path, prompt, new, threads, repeats = sys.argv[1], *map(int, sys.argv[2:6])
sizes = dict(n_ctx=prompt + new + 8, n_batch=512, n_threads=threads, n_threads_batch=threads)
model = llama_cpp.Llama(path, flash_attn=True, verbose=False, **sizes)
vocabulary = model.n_vocab()
def seconds(count):
    ids = [random.randrange(3, vocabulary) for _ in range(prompt)]
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    for _ in range(count - 1):
        model.eval([random.randrange(3, vocabulary)])
    return time.perf_counter() - start
seconds(new)
first = statistics.median(seconds(1) for _ in range(repeats))
whole = statistics.median(seconds(new) for _ in range(repeats))
print(json.dumps({"prefill": prompt / first, "decode": (new - 1) / (whole - first), "version": version("llama-cpp-python")}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    # five repetitions of a tiny model take a tenth of a second, in which the machine's speed may change
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {model.name: gguf(model, args.dtype, Path(folder)) for model in args.models}
        rounds = [{name: both(file, args, Path(folder)) for name, file in files.items()} for _ in range(args.rounds)]
    rows = {name: summary([result[name] for result in rounds]) for name in files}
    versions = {
        "torch": version("torch"),
        "llama-cpp-python": rounds[0][args.models[0].name]["llama.cpp"].pop("version"),
    }
    report = {
        "what": f"tokens/s of Quintet and llama.cpp, batch 1, {args.prompt} + {args.new} tokens, {args.dtype}, "
        f"medians of {args.rounds} rounds",
        "date": date.today().isoformat(),
        "machine": args.machine,
        "versions": versions,
        "rows": rows,
    }
    text = json.dumps(report, indent=2) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text)


def gguf(model: Path, dtype: str, folder: Path) -> Path:
    """Return the model in GGUF, without its tokenizer: GGUF has no name for some tokenizers, and token ids suffice."""
    if model.suffix == ".gguf":
        return model.resolve()
    bare, output = folder / f"{model.name}-bare", folder / model.name
    bare.mkdir()
    for file in [model / "config.json", *model.glob("*.safetensors"), *model.glob("*.bin")]:
        if file.exists():
            shutil.copy(file, bare)
    options = f"model.path={bare}", "convert.format=gguf", f"convert.dtype={dtype}", f"convert.output={output}"
    quintet("task=convert", *options, f"hydra.run.dir={folder}/convert")
    return output / "model.gguf"


def quintet(*overrides: str) -> None:
    subprocess.run([sys.executable, "run.py", *overrides], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def both(file: Path, args: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    sizes = f"bench.prompt_tokens={args.prompt}", f"bench.new_tokens={args.new}", f"bench.repeats={args.repeats}"
    model = f"model.path={file}", f"model.dtype={args.dtype}", "quant.probe=false"
    quintet("task=bench", *model, *sizes, f"hydra.run.dir={folder}/bench")
    ours = json.loads((folder / "bench" / "metrics.json").read_text())
    command = [args.peer, "-c", PEER, str(file), *map(str, (args.prompt, args.new, os.cpu_count(), args.repeats))]
    theirs = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    our_speeds = {name: ours[f"{name}_tokens_per_s"] for name in ("prefill", "decode")}
    return {"quintet": our_speeds, "llama.cpp": theirs}


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the medians, and the median of the rounds' ratios."""
    row: dict[str, dict[str, float]] = {}
    for phase in ("prefill", "decode"):
        ratios = [result["quintet"][phase] / result["llama.cpp"][phase] for result in rounds]
        middle = {
            engine: round(statistics.median(result[engine][phase] for result in rounds), 1) for engine in rounds[0]
        }
        row[phase] = middle | {"ratio": round(statistics.median(ratios), 2)}
    return row


if __name__ == "__main__":
    main()

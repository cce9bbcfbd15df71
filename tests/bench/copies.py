"""Decode speed on texts that repeat their prompt: with and without n-gram drafts, and with llama.cpp's prompt lookup.

`python tests/bench/copies.py --text FILE --llama-cpp PYTHON model.path=FOLDER device=cpu`. A prompt contains the
beginning of a paragraph of FILE twice, and then its first words; a model that copies continues the paragraph. Prompts
run one at a time, and all variants take turns in every round. PYTHON is an interpreter with llama_cpp, which reads the
same weights from GGUF; without it there are no rows of llama.cpp. Speeds are decoded tokens divided by the seconds
after each prompt's first token. The medians are written to tests/bench/results/copies.json; new rows replace old rows
of the same measurement.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from conf.compose import compose_run_config  # noqa: E402
from conf.decoding import DecodeConfig  # noqa: E402
from conf.speculation import Speculate  # noqa: E402
from pipelines.engine import Engine  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "copies.json"
NUM_PROMPTS, BEGUN_WORDS = 8, 4


def copying_prompts(text: str, num_words: int) -> list[str]:
    """Return prompts that a model continues by copying: the beginning of a paragraph twice, and then its first few
    words."""
    paragraphs = [words for line in text.splitlines() if len(words := line.split()) >= num_words]
    return [" ".join(words[:num_words] * 2 + words[:BEGUN_WORDS]) for words in paragraphs[:NUM_PROMPTS]]


def speed_of(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> float:
    """Return the decoded tokens per second after the first token of each prompt, one prompt at a time."""
    num_tokens, seconds = 0, 0.0
    for i, prompt in enumerate(prompts):
        (output,) = engine.generate([engine.request(i, prompt, decode)])
        num_tokens += len(output.completions[0].token_ids) - 1
        seconds += output.finished_s - (output.first_token_s or 0.0)
    return num_tokens / seconds


class LlamaCpp:
    """llama.cpp in its own process (llama_cpp_lookup.py). It answers a line of JSON with a line."""

    def __init__(self, python: str, model: str, num_tokens: int, folder: Path) -> None:
        convert = [f"model.path={model}", "convert.format=gguf", f"convert.output={folder / 'model'}"]
        convert.append(f"hydra.run.dir={folder / 'convert'}")
        subprocess.run([sys.executable, "run.py", "task=convert", *convert], cwd=REPOSITORY, check=True)
        (gguf,) = (folder / "model").glob("*.gguf")
        command = [python, str(Path(__file__).with_name("llama_cpp_lookup.py")), str(gguf), str(num_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def speed_of(self, prompts: list[list[int]], drafts: bool) -> float:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"prompts": prompts, "drafts": drafts}) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def measure(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Return the median speed of each variant, and the median ratio of each variant with drafts to the same variant
    without. All variants take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # warm-up
        for name, way in ways.items():
            speed = way()
            if turn:
                speeds[name].append(speed)
    row: dict[str, Any] = {f"{name}, tokens/s": round(statistics.median(values), 2) for name, values in speeds.items()}
    for name in [name for name in ways if f"{name} with drafts" in ways]:
        ratios = [a / b for a, b in zip(speeds[f"{name} with drafts"], speeds[name], strict=True)]
        row[f"{name}, ratio with drafts"] = round(statistics.median(ratios), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--words", type=int, default=40, help="of a paragraph, which stand in the prompt twice")
    parser.add_argument("--llama-cpp", help="an interpreter that has llama_cpp")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    run = compose_run_config(args.overrides)
    engine = load_engine(run, 1)
    assert engine.tokenizer
    prompts = [
        engine.tokenizer.encode(text, add_special_tokens=True)
        for text in copying_prompts(args.text.read_text(), args.words)
    ]
    plain = DecodeConfig(max_new_tokens=args.new_tokens, temperature=0.0, ignore_eos=True, prefix_cache=False)
    drafted = replace(plain, speculate=Speculate.ngram)
    ways = {
        "quintet": lambda: speed_of(engine, prompts, plain),
        "quintet with drafts": lambda: speed_of(engine, prompts, drafted),
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.llama_cpp:
            peer = LlamaCpp(args.llama_cpp, run.model.path, args.new_tokens, Path(folder))
            ways["llama.cpp"] = lambda: peer.speed_of(prompts, drafts=False)
            ways["llama.cpp with drafts"] = lambda: peer.speed_of(prompts, drafts=True)
        row = measure(ways, args.rounds)
        if args.llama_cpp:
            peer.close()
    name = f"{Path(run.model.path).name}, {args.text.name}"
    print(f"{name}: {row}")
    rows = json.loads(args.results.read_text())["rows"] if args.results.is_file() else {}
    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    write_atomically(args.results, [json.dumps(about | {"rows": rows | {name: row}}, indent=2) + "\n"])


if __name__ == "__main__":
    main()

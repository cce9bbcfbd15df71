"""Decode speed with drafts of a given accuracy, relative to the speed without drafts.

`python tests/bench/speculation.py model.path=FOLDER device=cpu`. For each format and number of rows, the plain run and
the runs with drafts take turns in one process. The proposer knows the tokens of the plain run and replaces a draft with
the probability 1 - acceptance. The medians of the ratios are written to tests/bench/results/speculation.json; new rows
replace old rows of the same measurement. (tests/bench/copies.py measures n-gram drafts.)
"""

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from conf.compose import compose_run_config  # noqa: E402
from conf.decoding import DecodeConfig  # noqa: E402
from conf.speculation import Speculate, SpeculationConfig  # noqa: E402
from pipelines.engine import Engine, Output  # noqa: E402
from pipelines.engine.proposers import Proposer  # noqa: E402
from pipelines.engine.request import Sequence  # noqa: E402
from pipelines.engine.speculation import Speculator  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "speculation.json"
PROMPT_TOKENS = 64


class Spoiled(Proposer):
    """Drafts the tokens of a plain run; each draft is right with the same probability."""

    def __init__(self, known: dict[int, list[int]], acceptance: float) -> None:
        self._known = known
        self._acceptance = acceptance
        self._random = random.Random(0)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._draft(sequence, most) for sequence, most in wanted]

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        said = sequence.num_output_tokens
        right = self._known[sequence.request.id][said : said + most]
        return [token if self._random.random() < self._acceptance else token ^ 1 for token in right]


def generate(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> tuple[list[Output], float]:
    """Return the outputs in the order of the prompts, and the decoded tokens per second after the first token of every
    row."""
    requests = [engine.request(i, prompt, decode) for i, prompt in enumerate(prompts)]
    outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
    first = max(output.first_token_s or 0.0 for output in outputs)
    num_tokens = sum(len(output.completions[0].token_ids) - 1 for output in outputs)
    return outputs, num_tokens / (max(output.finished_s for output in outputs) - first)


def measure(
    engine: Engine, prompts: list[list[int]], plain: DecodeConfig, acceptances: list[float], rounds: int
) -> dict[str, Any]:
    """Return ratios of the speeds with drafts to the plain speed, by acceptance."""
    outputs, _ = generate(engine, prompts, plain)
    said = {output.request_id: output.completions[0].token_ids for output in outputs}
    drafted = replace(plain, speculate=Speculate.ngram, speculation=SpeculationConfig(shared=False))
    ratios: dict[str, list[float]] = {str(a): [] for a in acceptances}
    speculators = {a: Speculator(engine.scheduler) for a in acceptances}  # each variant learns from its own rounds
    for acceptance, speculator in speculators.items():
        speculator.proposers[Speculate.ngram] = Spoiled(said, acceptance)
    speeds = []
    for turn in range(rounds + 1):  # warm-up
        _, speed = generate(engine, prompts, plain)
        speeds.append(speed)
        for acceptance, engine.speculator in speculators.items():
            again, with_drafts = generate(engine, prompts, drafted)
            assert {output.request_id: output.completions[0].token_ids for output in again} == said
            if turn:
                ratios[str(acceptance)].append(with_drafts / speed)
    row = {"plain_tokens_per_s": round(statistics.median(speeds[1:]), 2)}
    return row | {f"ratio at {name}": round(statistics.median(values), 3) for name, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["none", "a8w8", "int8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--acceptances", nargs="+", type=float, default=[0.0, 0.5, 0.8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    report: dict[str, Any] = json.loads(args.results.read_text()) if args.results.is_file() else {"rows": {}}
    for scheme in args.formats:
        quant = [f"quant={scheme}", *(["quant.method=rtn"] if scheme == "a8w8" else [])]
        run = compose_run_config([*args.overrides, *quant])
        engine = load_engine(run, max(args.rows))
        plain = DecodeConfig(max_new_tokens=args.new_tokens, temperature=0.0, ignore_eos=True, prefix_cache=False)
        for num_rows in args.rows:
            start = time.perf_counter()
            row = measure(engine, random_prompts(engine, num_rows), plain, args.acceptances, args.rounds)
            name = f"{Path(run.model.path).name}, {scheme}, {num_rows} rows"
            report["rows"][name] = row
            print(f"{name}: {row} in {time.perf_counter() - start:.0f} s", flush=True)
            about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
            write_atomically(args.results, [json.dumps(about | {"rows": report["rows"]}, indent=2) + "\n"])


def random_prompts(engine: Engine, num_rows: int) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(5, engine.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]


if __name__ == "__main__":
    main()

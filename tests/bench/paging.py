"""Memory of a paged cache compared with caches of full length: `python tests/bench/paging.py --questions FILE
model=tiny device=cpu`.

The trace of a chat server: each question of FILE (JSON lines with `turns`) is a conversation of two turns, whose second
prompt contains the first answer. Answer lengths follow a log-normal distribution (median 128, sigma 0.8, at most 400).
After each step three numbers are recorded: the tokens of the running rows, the slots of their blocks (a shared block
counts once), and the slots of caches with the full context length. They depend only on lengths, not on the model.
Results: tests/bench/results/paging.json.
"""

import argparse
import json
import math
import random
import sys
from collections import deque
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from conf.compose import compose_run_config  # noqa: E402
from conf.decoding import DecodeConfig  # noqa: E402
from pipelines.engine import Engine, Request  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "paging.json"
MEDIAN, SIGMA, MOST = 128, 0.8, 400


def measure(engine: Engine, conversations: list[list[str]]) -> dict[str, Any]:
    """Run the conversations, as many at once as the engine admits."""
    generator = random.Random(0)
    waiting: deque[tuple[int, list[dict[str, str]]]] = deque(
        (number, [{"role": "user", "content": turns[0]}]) for number, turns in enumerate(conversations)
    )
    messages = dict(waiting)
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def next_request() -> Request | None:
        if not waiting:
            return None
        number, said = waiting.popleft()
        length = min(MOST, max(1, round(MEDIAN * math.exp(generator.gauss(0, SIGMA)))))
        decode = DecodeConfig(max_new_tokens=length, temperature=0.0, ignore_eos=True)
        return engine.request(number, tokenizer.encode_messages(said, None, True)[1][-500:], decode)

    num_tokens, held_slots, reserved, rows, peak = 0, 0, 0, [], 0
    with closing(engine.steps(next_request)) as steps:
        for outputs in steps:
            for output in outputs:
                said, turns = messages[output.request_id], conversations[output.request_id]
                if len(said) < 2 * len(turns) - 1:
                    answer = {"role": "assistant", "content": output.completions[0].text}
                    said += [answer, {"role": "user", "content": turns[1]}]
                    waiting.append((output.request_id, said))
            sequences = [sequence for group in engine.scheduler.running for sequence in group.sequences]
            blocks = {block for sequence in sequences for block in sequence.block_table}
            num_tokens += sum(sequence.num_computed_tokens for sequence in sequences)
            held_slots += len(blocks) * engine.block_size
            reserved += len(sequences) * engine.config.context.num_tokens
            peak = max(peak, len(blocks) * engine.block_size)
            rows.append(len(sequences))
    return {
        "rows_at_once": engine.config.max_num_requests,
        "context": engine.config.context.num_tokens,
        "block_size": engine.block_size,
        "num_steps": len(rows),
        "mean_rows": round(sum(rows) / len(rows), 2),
        "tokens_over_places_of_blocks": round(num_tokens / held_slots, 3),
        "tokens_over_places_of_full_caches": round(num_tokens / reserved, 3),
        "places_of_blocks_over_full_caches": round(held_slots / reserved, 3),
        "peak_places_of_blocks_over_full_caches": round(
            peak / engine.config.max_num_requests / engine.config.context.num_tokens, 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16])
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    conversations = [json.loads(line)["turns"] for line in args.questions.read_text(encoding="utf-8").splitlines()]
    rows = []
    for num_rows in args.rows:
        rows.append(measure(load_engine(compose_run_config(args.overrides), num_rows), conversations))
        print(rows[-1], flush=True)
    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    write_atomically(RESULTS, [json.dumps(about | {"questions": args.questions.name, "rows": rows}, indent=1) + "\n"])


if __name__ == "__main__":
    main()

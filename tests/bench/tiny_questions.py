"""Accuracy of the bundled model on held-out questions: `python tests/bench/tiny_questions.py [--questions N] [key=value
...]`.

Prints the share by kind and writes it to tests/bench/results/tiny_questions.json. Overrides: as for run.py, so
that the effect of a setting can be measured in the same way.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.tiny.corpus import Question, questions
from pipelines import TextGenerationPipeline, pipeline
from pipelines.jobs.report import environment

SEED = 2024  # seed of the held-out questions; the training text contains none of them, whatever its seeds
RESULT = Path(__file__).parent / "results" / "tiny_questions.json"


def held_out_questions(count: int) -> list[Question]:
    return [rounds[0] for rounds in itertools.islice(questions(SEED, held_out=True), count)]


def right_answers(pipe: TextGenerationPipeline, asked: list[Question]) -> list[bool]:
    """Return whether each answer equals the expected answer."""
    rows = [{"messages": [{"role": "user", "content": question.prompt}]} for question in asked]
    outputs = pipe(rows, max_new_tokens=40, do_sample=False, return_full_text=False)
    return [row["text_generation_text"][0] == question.answer for row, question in zip(outputs, asked, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    asked = held_out_questions(options.questions)
    right = right_answers(pipeline("text_generation", model="tiny", device="cpu", overrides=options.overrides), asked)
    total, correct = Counter(q.kind for q in asked), Counter(q.kind for q, ok in zip(asked, right, strict=True) if ok)
    for kind in sorted(total):
        print(f"{kind:10s} {correct[kind]:4d} of {total[kind]:4d}")
    print(f"accuracy {sum(right) / len(right):.4f}")
    if not options.overrides:
        machine = environment()
        row = {
            "date": date.today().isoformat(),
            "questions": len(asked),
            "accuracy": sum(right) / len(right),
            "by_kind": {kind: correct[kind] / total[kind] for kind in sorted(total)},
            "cpu": machine["cpu"],
            "torch": machine["packages"]["torch"],
        }
        RESULT.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()

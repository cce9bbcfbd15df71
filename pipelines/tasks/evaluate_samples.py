"""samples.jsonl of `task=evaluate`: a line for each window, question and lm_eval document, and their metrics."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipelines.jobs import uncertainty
from pipelines.jobs.journal import dumps
from pipelines.jobs.scoring import Scores, Window
from pipelines.jobs.uncertainty import Spread
from pipelines.tasks.evaluate_data import Answer, Question

SAMPLES = "samples.jsonl"
WINDOW, QUESTION, DOCUMENT = "window", "question", "document"
Sample = dict[str, Any]
Key = tuple[str, str]
"""Kind and id of a sample."""


def window_inputs(windows: list[list[Window]]) -> dict[str, str]:
    """Return a digest of each window's tokens and of how many are scored, by id. `windows` are by text."""
    return {
        f"{text}:{number}": _digest([window.num_scored, *window.token_ids])
        for text, text_windows in enumerate(windows)
        for number, window in enumerate(text_windows)
    }


def question_inputs(questions: list[Question]) -> dict[str, str]:
    """Return a digest of each question with its expected answer, by id."""
    rows = ((question.row, question.answer) for question in questions)
    return {
        str(number): _digest([row.prompt, row.messages, row.prompt_token_ids, answer])
        for number, (row, answer) in enumerate(rows)
    }


def window_samples(inputs: dict[str, str], scores: Scores) -> list[Sample]:
    samples = []
    for (id, digest), result in zip(inputs.items(), scores.windows, strict=True):
        sample = {"kind": WINDOW, "id": id, "input": digest, "num_tokens": result.num_tokens, "nll": result.nll}
        if result.divergence:
            sample |= {"kl": float(result.divergence.kl.sum()), "num_agreed": result.divergence.num_agreed}
        samples.append(sample)
    return samples


def question_samples(inputs: dict[str, str], questions: list[Question], answers: list[Answer]) -> list[Sample]:
    return [
        {
            "kind": QUESTION,
            "id": id,
            "input": digest,
            "score": int(answer.is_right),
            "expected": question.answer,
            "answer": answer.text,
            "num_tokens": answer.num_tokens,
        }
        for (id, digest), question, answer in zip(inputs.items(), questions, answers, strict=True)
    ]


def write_samples(samples: Iterable[Sample]) -> str:
    return "".join(dumps(sample) + "\n" for sample in samples)


def by_key(samples: Iterable[Sample]) -> dict[Key, Sample]:
    return {(sample["kind"], sample["id"]): sample for sample in samples}


def quality(scores: Scores | None, answers: list[Answer], seed: int) -> dict[str, Any]:
    """Return the metrics with their `_stderr` and `_ci95`. A metric that was not measured is None."""
    num_right = sum(answer.is_right for answer in answers)
    values = {
        "nll_per_token": scores and scores.nll_per_token,
        "perplexity": scores and scores.perplexity,
        "kl_mean": scores and scores.kl_mean,
        "kl_p99": scores and scores.kl_p99,
        "top1_agreement": scores and scores.top1_agreement,
        "accuracy": num_right / len(answers) if answers else None,
    }
    spreads = _spreads(scores, seed) if scores else {}
    spreads["accuracy"] = uncertainty.share(num_right, len(answers))
    metrics: dict[str, Any] = {}
    for name, value in values.items():
        spread = spreads.get(name)
        metrics |= {
            name: value,
            f"{name}_stderr": spread and spread.stderr,
            f"{name}_ci95": list(spread.interval) if spread and spread.interval else None,
        }
    counts = {"num_scored_tokens": scores.num_tokens if scores else 0, "num_questions": len(answers)}
    return metrics | counts


def _spreads(scores: Scores, seed: int) -> dict[str, Spread | None]:
    counts = [window.num_tokens for window in scores.windows]
    nll = [window.nll for window in scores.windows]
    spreads = {
        "nll_per_token": uncertainty.ratio(nll, counts, seed),
        "perplexity": uncertainty.ratio(nll, counts, seed, np.exp) if scores.perplexity is not None else None,
    }
    if divergences := scores.divergences:
        kl = [divergence.kl.numpy() for divergence in divergences]
        spreads["kl_mean"] = uncertainty.ratio([float(part.sum()) for part in kl], counts, seed)
        spreads["kl_p99"] = uncertainty.percentile(kl, 0.99, seed)
        spreads["top1_agreement"] = uncertainty.ratio([d.num_agreed for d in divergences], counts, seed)
    return spreads


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

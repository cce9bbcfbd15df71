"""The saved results of a finished job over rows, and the first difference of a row that ran again."""

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from conf.schema import Task
from pipelines.jobs.compared import differences, logprob_at, row_difference
from pipelines.jobs.journal import dumps
from pipelines.jobs.rows import EngineRows, Record, Row
from pipelines.tasks.embed import EmbedRows
from pipelines.tasks.predict_rows import PredictRows
from pipelines.tasks.score import ScoreRows

VECTOR = "vector"


class Kind(NamedTuple):
    """A task over rows: the class that computes its rows, and the files of its results: rows, then vectors."""

    rows: type[EngineRows]
    files: tuple[str, ...]


KINDS = {
    Task.predict: Kind(PredictRows, ("predictions.jsonl",)),
    Task.embed: Kind(EmbedRows, ("rows.jsonl", "embeddings.npy")),
    Task.score: Kind(ScoreRows, ("scores.jsonl",)),
}
INPUT = ("prompt", "id", "num_prompt_tokens", "num_truncated_tokens")  # fields that the input alone determines


def saved_rows(folder: Path, task: Task, num_wanted: int, seed: int) -> tuple[int, dict[int, Row]]:
    """Return the number of a job's results, and up to `num_wanted` of them by index, chosen by `seed`.

    Raises UserError for a file that is missing, empty or damaged.
    """
    file, *files_of_vectors = (folder / name for name in KINDS[task].files)
    num_rows = sum(1 for _ in _lines(file))
    if not num_rows:
        raise UserError(f"{file} is empty: give the folder of a finished job")
    chosen = set(random.Random(seed).sample(range(num_rows), min(num_wanted, num_rows)))
    rows = {index: _parsed(file, index, line) for index, line in enumerate(_lines(file)) if index in chosen}
    for file_of_vectors in files_of_vectors:
        vectors = _vectors(file_of_vectors, num_rows)
        rows = {index: row | ({} if row["error"] else {VECTOR: vectors[index].tolist()}) for index, row in rows.items()}
    return num_rows, rows


def result_of(record: Record) -> Row:
    """Return the result of a record as the files of a job have it."""
    vector = {VECTOR: np.frombuffer(base64.b64decode(record["vector"]), "<f4").tolist()} if "vector" in record else {}
    row: Row = json.loads(dumps(record["row"])) | vector
    return row


def difference_of(index: int, saved: Row, again: Row) -> dict[str, Any] | None:
    """Return the first difference of a row: its place, both values, and a line. None: the row is equal to the bit.

    A difference of tokens has both log probabilities, if the rows have them. Raises UserError if the row's input has
    changed.
    """
    for name in INPUT:
        if saved.get(name) != again.get(name) and not saved["error"] and not again["error"]:
            raise UserError(f"row {index} has another {name} now than when the job ran: restore the data")
    for place, before, now in differences(saved, again):
        logprobs = {"logprob_before": logprob_at(saved, place), "logprob_now": logprob_at(again, place)}
        line = f"row {index}: {row_difference(saved, again)}"
        return {"row": index, "place": list(place), "before": before, "now": now, **logprobs, "line": line}
    return None


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with open(file, "rb") as stream:
            yield from stream
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give the folder of a finished job") from error


def _parsed(file: Path, index: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
        if line.endswith(b"\n") and row["index"] == index and "error" in row:
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"line {index + 1} of {file} is damaged: give the folder of a finished job")


def _vectors(file: Path, num_rows: int) -> np.ndarray[Any, Any]:
    try:
        vectors: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): give the folder of a finished job") from error
    if vectors.ndim != 2 or len(vectors) != num_rows:
        raise UserError(f"{file} has the shape {vectors.shape}, but the job {num_rows} rows: restore the file")
    return vectors

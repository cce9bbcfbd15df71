"""The first difference of the results of two runs, as a line for people."""

import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import UserError, shortened
from pipelines.jobs.run_lock import hash_file

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
FIRST = ("token_ids", "logprobs")  # compared before text and the numbers that follow from the tokens
ABSENT = "absent"
UNREPEATED = ("_s", "peak_memory_bytes", "changes")
"""Ends of the names of metrics that no run repeats: seconds, rates, peaks, and changes since the job of a certificate."""


class Paths(NamedTuple):
    before: Path
    now: Path


def rows_difference(paths: Paths) -> str | None:
    """Return the first difference of two JSONL files of rows, or None if their bytes are equal."""
    with open(paths.before, "rb") as before, open(paths.now, "rb") as now:
        for number, lines in enumerate(zip_longest(before, now)):
            if lines[0] != lines[1]:
                return f"row {number} of {paths.now.name}: {row_difference(*map(_row, lines))}"
    return None


def _row(line: bytes | None) -> dict[str, Any]:
    if line is None:
        return {}
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise UserError(f"a line of the results is not a JSON object ({error}): run the job again") from error


def row_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the first difference of two rows that are not equal."""
    place, old, new = next(differences(before, now), ((), "these bytes", "other bytes"))
    number = next((key for key in reversed(place) if isinstance(key, int)), None)
    sample = f"completion {place[1]}: " if place[:1] == ("completions",) else ""
    if place and place[-1] == number and "token_ids" in place[-2:]:
        old, new = (_with_logprob(row, place, value) for row, value in ((before, old), (now, new)))
        return f"{sample}token {number} is {old} before and {new} now"
    if number is not None and "logprobs" in place:
        completion = _value_at(now, place[: place.index("logprobs")])
        token = f"token {number} ({_value_at(completion, ('token_ids', number))})"
        return f"{sample}{token}: {_dotted(place[-2:])} is {old} before and {new} now"
    return f"{_dotted(place)} is {shortened(repr(old))} before and {shortened(repr(new))} now"


def _with_logprob(row: dict[str, Any], place: Place, token: Any) -> str:
    logprob = logprob_at(row, place)
    return str(token) if logprob is None else f"{token} (log probability {logprob})"


def logprob_at(row: dict[str, Any], place: Place) -> float | None:
    """Return the log probability of the token at `place`; None if the row does not have it or the place has no token."""
    try:
        completion, number = _value_at(row, place[:-2]), place[-1]
        return float(completion["logprobs"][number][str(completion["token_ids"][number])]["logprob"])
    except (KeyError, IndexError, TypeError):
        return None


def differences(before: Any, now: Any, place: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Yield the place and both values of each difference of two JSON values."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in FIRST if name in before and name in now]
        for name in dict.fromkeys([*names, *before, *now]):
            yield from differences(before.get(name, ABSENT), now.get(name, ABSENT), (*place, name))
    elif isinstance(before, list) and isinstance(now, list):
        for number, (old, new) in enumerate(zip_longest(before, now, fillvalue=ABSENT)):
            yield from differences(old, new, (*place, number))
    elif repr(before) != repr(now):  # NaN equals itself, and 1 is not 1.0
        yield place, before, now


def _value_at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _dotted(place: Place) -> str:
    return ".".join(map(str, place)) or "the line"


def vectors_difference(paths: Paths) -> str | None:
    """Return the first difference of two embeddings.npy and of the rows next to them, or None if they are equal."""
    import numpy as np  # imported here: the server's HTTP process runs without it

    rows = Paths(*(path.with_name("rows.jsonl") for path in paths))
    if difference := rows_difference(rows):
        return difference
    before, now = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
    if before.shape != now.shape:
        return f"{paths.now.name} has shape {before.shape} before and {now.shape} now"
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        if old.tobytes() != new.tobytes():
            at = int((old.view(np.uint32) != new.view(np.uint32)).argmax())
            return f"row {number} of {paths.now.name}: number {at} is {old[at]} before and {new[at]} now"
    return None


def metrics_difference(paths: Paths) -> str | None:
    """Return the first difference of two metrics.json, or None. Times, speeds and peaks of memory are not compared.

    If both have samples.jsonl next to them, name the first sample that differs too.
    """
    before, now = (_metrics(path) for path in paths)
    samples = Paths(*(path.with_name("samples.jsonl") for path in paths))
    sample = rows_difference(samples) if all(path.is_file() for path in samples) else None
    for place, old, new in differences(before, now):
        return f"{_dotted(place)} is {old} before and {new} now" + (f"; {sample}" if sample else "")
    return sample


def _metrics(path: Path) -> Mapping[str, Any]:
    return {name: value for name, value in _row(path.read_bytes()).items() if not name.endswith(UNREPEATED)}


def files_difference(paths: Paths, ignored: tuple[str, ...] = ()) -> str | None:
    """Return the first file of two folders, or of two files, whose SHA-256 differ or that only one folder has.

    `ignored`: names of files that are not compared.
    """
    before, now = ({name: file for name, file in _files(path).items() if name not in ignored} for path in paths)
    for name in sorted(before | now):
        if name not in before or name not in now:
            return f"file {name} is {'new' if name in now else 'missing'} in {paths.now}"
        old, new = (hash_file(files[name]).sha256 for files in (before, now))
        if old != new:
            return f"file {name}: sha256 {old} before and {new} now"
    return None


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    return {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}

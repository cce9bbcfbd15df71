"""Reads and checks the lines of a batch's input file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from conf.errors import shortened

MAX_LINES = 50_000
MAX_ERRORS = 20  # reported per file


@dataclass(frozen=True)
class InputLine:
    """A line of a checked file."""

    index: int
    digest: str
    custom_id: str
    body: dict[str, Any]


class Checked(NamedTuple):
    """The result of checking an input file.

    `errors` has at most MAX_ERRORS objects in the format of OpenAI's API. It is empty if the file can be run.
    """

    num_lines: int
    errors: list[dict[str, Any]]


def input_lines(path: Path) -> Iterator[InputLine]:
    """Yield the lines of a file that `check_lines` has accepted. Raises OSError."""
    with open(path, "rb") as file:
        for index, line in enumerate(line for line in file if line.strip()):
            values = json.loads(line)
            yield InputLine(index, blake2b(line, digest_size=8).hexdigest(), values["custom_id"], values["body"])


def check_lines(path: Path, endpoint: str, max_line: int) -> Checked:
    """Count the lines of a file and check their form for `endpoint`. Bodies are not checked. Raises OSError.

    `max_line`: maximum size of a line in bytes.
    """
    if not path.exists():
        return Checked(0, [_error("file_not_found", None, "the file no longer exists: upload it again")])
    errors: list[dict[str, Any]] = []
    custom_ids: set[str] = set()
    num_lines = 0
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(max_line + 1):
            number += 1
            if len(line) > max_line:
                return Checked(num_lines, [*errors, _error("line_too_long", number, f"at most {max_line} bytes")])
            if not line.strip():
                continue
            num_lines += 1
            if num_lines > MAX_LINES:
                return Checked(num_lines, [*errors, _error("too_many_lines", number, f"at most {MAX_LINES} lines")])
            if error := _fault(line, number, endpoint, custom_ids):
                errors.append(error)
            if len(errors) == MAX_ERRORS:
                break
    if num_lines == 0:
        errors.append(_error("empty_file", None, "the file has no lines: give one for each request"))
    return Checked(num_lines, errors)


def _fault(line: bytes, number: int, endpoint: str, custom_ids: set[str]) -> dict[str, Any] | None:
    """Return the error of a line, or None. Adds the line's custom_id to `custom_ids`."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return _error("invalid_json_line", number, "this line is not JSON: give an object in each line")
    if not isinstance(values, dict) or set(values) != {"custom_id", "method", "url", "body"}:
        return _error("invalid_line", number, "a line is an object of custom_id, method, url and body")
    custom_id, url = values["custom_id"], values["url"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512 or not custom_id.isprintable():
        message = "give a text of 1 to 512 characters that can be printed"
        return _error("invalid_custom_id", number, message, "custom_id")
    if custom_id in custom_ids:
        message = f"{shortened(custom_id)} is the custom_id of an earlier line: give each line its own"
        return _error("duplicate_custom_id", number, message, "custom_id")
    custom_ids.add(custom_id)
    if values["method"] != "POST":
        return _error("invalid_method", number, "give POST", "method")
    if url != endpoint:
        return _error("mismatched_endpoint", number, f"the endpoint of the batch is {endpoint}: give this url", "url")
    if not isinstance(values["body"], dict):
        return _error("invalid_body", number, "give the JSON object of a request", "body")
    return None


def _error(code: str, line: int | None, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}

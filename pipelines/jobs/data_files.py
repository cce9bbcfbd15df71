"""Files of prompts and texts: which setting values name a file, and the lines of a file in any form.

Every `data` setting reads `.txt`, `.jsonl`, `.csv` and `.json`, in upper or lower case, and each also compressed as
`.gz`.
"""

import codecs
import csv
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from conf.errors import UserError

ROWS = (".jsonl", ".csv", ".json")
FORMS = (".txt", *ROWS)


@dataclass(frozen=True)
class DataFile:
    path: Path
    form: str
    """One of FORMS."""
    where: str
    """The file's name in errors."""
    columns: tuple[str, ...]
    """Columns of which a table needs at least one."""

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of a `.txt` or `.jsonl`, or the rows of another form as lines of JSON.

        Only a `.json` is read as a whole.

        Raises UserError if the file cannot be read or does not have its form.
        """
        try:
            with cast(BinaryIO, gzip.open(self.path)) if _is_gzip(self.path) else open(self.path, "rb") as stream:
                yield from {".csv": self._csv_rows, ".json": self._json_rows}.get(self.form, iter)(stream)
        except UserError:  # already describes the content
            raise
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise UserError(f"{self.where} cannot be read ({getattr(error, 'strerror', None) or error})") from error

    def _csv_rows(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """Yield rows.

        Cells are texts; an empty cell is null, except a prompt. Raises UserError for a row of another length.
        """
        csv.field_size_limit(sys.maxsize)  # process-wide; the default is 131,072, but a .jsonl has no such limit
        table = csv.reader(decoded(stream, self.where), strict=True)
        try:
            heading = next(table, [])
            if not set(heading) & set(self.columns) or len(set(heading)) < len(heading):
                named = ", ".join(heading) or "nothing"
                raise UserError(
                    f"{self.where} needs a first line of different names, one of them {' or '.join(self.columns)}, but it has {named}"
                )
            for cells in table:
                if cells and len(cells) != len(heading):
                    counts = f"{len(cells)} cells in line {table.line_num}, but {len(heading)} columns"
                    raise UserError(f"{self.where} has {counts}: put cells that hold a comma into double quotes")
                row = {name: cell if cell or name in self.columns else None for name, cell in zip(heading, cells)}  # noqa: B905
                yield _json_line(row) if cells else b"\n"
        except csv.Error as error:
            remedy = "correct the line, or give a .jsonl"
            raise UserError(f"{self.where} is not valid CSV in line {table.line_num} ({error}): {remedy}") from error

    def _json_rows(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the rows of a list of rows or texts, or of an object of columns, which are lists of equal length.

        PaddleNLP writes one object per line into a .json: each line is a row.
        """
        text = "".join(decoded(stream, self.where))
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            if getattr(error, "msg", "") == "Extra data" and text.lstrip().startswith("{"):
                yield from (line.encode() + b"\n" for line in text.removesuffix("\n").split("\n"))
                return
            raise UserError(f"{self.where} is not JSON: {error}") from error
        rows = values if isinstance(values, list) else [values] if self._is_row(values) else self._transposed(values)
        for row in rows:
            yield _json_line({self.columns[0]: row} if isinstance(row, str) else row)

    def _is_row(self, values: Any) -> bool:
        """Return whether an object is the only row of a file with one row per line."""
        return isinstance(values, dict) and (
            "src" in values or any(type(values.get(name)) is str for name in self.columns)
        )

    def _transposed(self, table: Any) -> Iterator[dict[str, Any]]:
        columns = list(table.values()) if isinstance(table, dict) and set(table) & set(self.columns) else []
        lengths = {len(column) if isinstance(column, list) else None for column in columns}
        if len(lengths) != 1 or None in lengths:
            allowed = (
                f"a list of rows nor an object of lists of one length, of which one is {' or '.join(self.columns)}"
            )
            raise UserError(f"{self.where} is neither {allowed}")
        return (dict(zip(table, cells, strict=True)) for cells in zip(*columns, strict=True))


def find_file(
    key: str, value: str | Path, forms: tuple[str, ...], missing: str, columns: tuple[str, ...] = ("prompt",)
) -> DataFile:
    """Return the file that a setting names. `~` is the home folder. `missing`: error text if the file does not exist.

    Raises UserError for a missing file, an empty value, a folder, and an ending that is not in `forms`.
    """
    where, path = f"{key}={value}", expanded(value)
    allowed = f"{', '.join(forms)} or .gz of these"
    if value == "":
        raise UserError(f"{key} is empty: give a file that ends in {allowed}, or leave it out")
    if path.is_dir():
        raise UserError(f"{where} cannot be read (it is a folder): give a file that ends in {allowed}")
    if not _exists(path):
        raise UserError(f"{where} {missing}")
    if form_of(path) not in forms:
        raise UserError(f"{where} is a file, but its name does not end in {allowed}: rename it, or convert it")
    return DataFile(path, form_of(path), where, columns)


def names_a_file(value: str) -> bool:
    """Return whether a value is an existing path, or looks like a path.

    A value looks like a path if it has a known ending or a separator, and no white space.
    """
    path_like = form_of(Path(value)) in FORMS or "/" in value
    return _exists(expanded(value)) or (path_like and not re.search(r"\s", value))


def expanded(value: str | Path) -> Path:
    return Path(os.path.expanduser(value))


def form_of(path: Path) -> str:
    """Return the file's ending in lower case. For a `.gz` it is the ending of the compressed file."""
    return (Path(path.stem) if _is_gzip(path) else path).suffix.lower()


def decoded(lines: Iterable[bytes], where: str) -> Iterator[str]:
    """Decode lines of UTF-8, without the byte order mark. Raises UserError for the first invalid byte."""
    offset = 0
    for content in lines:
        yield decode_utf8(content, where, offset)
        offset += len(content)


def decode_utf8(content: bytes, where: str, offset: int = 0) -> str:
    """Decode bytes at `offset` of a file, without its byte order mark. Raises UserError for the first invalid byte."""
    try:
        return content.decode("utf-8").removeprefix("" if offset else codecs.BOM_UTF8.decode())
    except UnicodeDecodeError as error:
        at = f"byte {offset + error.start} is 0x{content[error.start]:02x}"
        raise UserError(f"{where} is not UTF-8 ({at}): convert it first") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or not a valid name
        return False


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _json_line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"

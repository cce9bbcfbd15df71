"""Files of prompts and texts: which value names one, and its lines, in whatever form they are stored.

Every `data` setting reads these: `.txt`, `.jsonl`, `.csv` and `.json` in any case, each also compressed as `.gz`.
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
    """What errors call it."""
    columns: tuple[str, ...]
    """Of these a table must have one."""

    def lines(self) -> Iterator[bytes]:
        """The lines of a `.txt` or `.jsonl`; the rows of other forms as lines of JSON. All but a `.json` are read as they are taken.

        Raises UserError for a file that cannot be read or is not of its form.
        """
        try:
            with cast(BinaryIO, gzip.open(self.path)) if _is_gzip(self.path) else open(self.path, "rb") as stream:
                yield from {".csv": self._csv_rows, ".json": self._json_rows}.get(self.form, iter)(stream)
        except UserError:  # of what is in the file
            raise
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise UserError(f"{self.where} cannot be read ({getattr(error, 'strerror', None) or error})") from error

    def _csv_rows(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """Cells are texts; an empty one is null, except a prompt. A row of another length is a fault of the whole file's quoting."""
        csv.field_size_limit(sys.maxsize)  # of the process, by default 131,072: no limit, as for a line of a .jsonl
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
            remedy = "put it right, or give a .jsonl"
            raise UserError(f"{self.where} is no CSV in line {table.line_num} ({error}): {remedy}") from error

    def _json_rows(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """A list of rows or texts, or an object of columns, which are lists of equal lengths."""
        text = "".join(decoded(stream, self.where))
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.where} is not JSON: {error}") from error
        rows = values if isinstance(values, list) else self._transposed(values)
        for row in rows:
            yield _json_line({self.columns[0]: row} if isinstance(row, str) else row)

    def _transposed(self, table: Any) -> Iterator[dict[str, Any]]:
        """Rows of an object of columns."""
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
    """The file that a setting names; `~` is the home folder. `missing` is what its error says where there is none.

    Raises UserError for an empty value, a folder and another ending, too.
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
    """Whether it is the path of something that is there, or looks like one: a known ending or a path separator, and no white space."""
    path_like = form_of(Path(value)) in FORMS or "/" in value
    return _exists(expanded(value)) or (path_like and not re.search(r"\s", value))


def expanded(value: str | Path) -> Path:
    return Path(os.path.expanduser(value))


def form_of(path: Path) -> str:
    """The ending that counts, in lower case: that of what a `.gz` compresses."""
    return (Path(path.stem) if _is_gzip(path) else path).suffix.lower()


def decoded(lines: Iterable[bytes], where: str) -> Iterator[str]:
    """Lines of UTF-8 without the byte order mark. Raises UserError for the first wrong byte."""
    offset = 0
    for content in lines:
        yield decode_utf8(content, where, offset)
        offset += len(content)


def decode_utf8(content: bytes, where: str, offset: int = 0) -> str:
    """The text of bytes that begin at `offset` of a file, without its byte order mark. Raises UserError for the first wrong byte."""
    try:
        return content.decode("utf-8").removeprefix("" if offset else codecs.BOM_UTF8.decode())
    except UnicodeDecodeError as error:
        at = f"byte {offset + error.start} is 0x{content[error.start]:02x}"
        raise UserError(f"{where} is not UTF-8 ({at}): convert it first") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or not a name at all
        return False


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _json_line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"

"""Read the rows of `predict.data`: a prompt, a file or standard input."""

import hashlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast

from conf.errors import UserError, shortened
from models.tokenizers.messages import check_messages
from pipelines.engine.faults import row_error
from pipelines.jobs.data_files import FORMS, DataFile, decode_utf8, find_file, names_a_file

GIVE = "give a prompt, a .txt, a .jsonl, or - for stdin; .csv, .json, and each of these with .gz are also read"
MISSING = f"cannot be read (it looks like a path, but the file does not exist): {GIVE}; put a prompt that looks like a path into a .jsonl"
INPUTS = ("prompt", "messages", "prompt_token_ids", "src", "query")
MAX_TOKEN_ID = 2**31  # a tokenizer's decoder takes no larger id; the engine checks ids against the vocabulary
FIELDS = (*INPUTS, "tgt", "document", "id", "decode", "prefix", "adapter", "prediction")
ReadBatchLine = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts a line of an OpenAI batch to the fields of a row. Raises UserError."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a job: exactly one of prompt, messages, prompt_token_ids and pair, or an error."""

    index: int
    id: str | int | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    pair: tuple[str, str] | None = None
    """A query and a document, for a reranker or an embedding model."""
    source: dict[str, Any] | None = field(default=None, compare=False)
    """`src` and `tgt` of the input, if the row has them."""
    decode: dict[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    """Name of the soft prefix in front of the prompt."""
    prediction: str | None = None
    """Expected answer, from which draft tokens are copied."""
    adapter: str | None = None
    """Name of the adapter."""
    error: str | None = None
    batch: dict[str, Any] | None = field(default=None, compare=False)
    """The whole line, if it is a line of an OpenAI batch."""
    digest: str = field(default="", compare=False)
    """Hash of the input line."""


class Lines:
    """The non-blank lines of a UTF-8 stream. Only one line is in memory."""

    def __init__(self, stream: Iterable[bytes], where: str) -> None:
        self._stream = stream
        self.where = where
        self._sha256 = hashlib.sha256()
        self.num_kept = 0
        self.num_blank = 0

    @property
    def sha256(self) -> str:
        """Return the sha256 of the lines read so far."""
        return self._sha256.hexdigest()

    def __iter__(self) -> Iterator[str]:
        """Yield the lines. Raises UserError if the stream is not UTF-8, and at its end if all lines were blank."""
        offset = 0
        for content in self._stream:  # split at \n only: no other character ends a line
            line = decode_utf8(content, self.where, offset).removesuffix("\n").removesuffix("\r")
            self._sha256.update(content)
            offset += len(content)
            if line.strip():
                self.num_kept += 1
                yield line
            else:
                self.num_blank += 1
        if not self.num_kept:
            raise UserError(f"{self.where} has no prompts: give at least one")


class Prompts:
    """The rows of a job.

    They can be iterated only once. An invalid row becomes a row with an error. Counts are of the rows read so far.
    """

    def __init__(
        self,
        lines: Lines,
        as_json: bool | None,
        first_pass: Lines | None = None,
        takes_texts: bool = False,
        read_batch_line: ReadBatchLine | None = None,
    ) -> None:
        """`as_json`: whether the lines are JSON; None: the first line decides.

        `first_pass`: a second reader of the same lines, already read to the end. It has the digest and the number of rows.

        `takes_texts`: whether a row may have its prompt as "text".

        `read_batch_line`: None if the rows may not be lines of an OpenAI batch.
        """
        self._takes_texts = takes_texts
        self._read_batch_line = read_batch_line
        self._lines = lines
        self._first_pass = first_pass
        self._rest = iter(lines)
        if first_pass is None:
            first = next(self._rest)  # an error here comes before anything is loaded or written
            as_json = _is_json_row(first) if as_json is None else as_json
            self._rest = chain([first], self._rest)
        self._as_json = as_json
        self._unused: set[str] = set()

    @property
    def sha256(self) -> str | None:
        """Return the sha256 of the input; None for input that can be read only once."""
        return f"{self._first_pass.sha256} {'json' if self._as_json else 'text'}" if self._first_pass else None

    @property
    def num_rows(self) -> int | None:
        """Return the number of rows; None for input that can be read only once."""
        return self._first_pass.num_kept if self._first_pass else None

    @property
    def num_blank_lines(self) -> int:
        return self._lines.num_blank

    @property
    def unused_fields(self) -> list[str]:
        """Return the names of fields that nothing reads, for a warning."""
        return sorted(self._unused)

    def __iter__(self) -> Iterator[PromptRow]:
        for index, line in enumerate(self._rest):
            digest = hashlib.blake2b(line.encode(), digest_size=8).hexdigest()
            yield replace(self._parse(index, line), digest=digest)
        if self._first_pass and self._lines.sha256 != self._first_pass.sha256:
            raise UserError(f"{self._lines.where} changed while it was read: run it again")

    def _parse(self, index: int, line: str) -> PromptRow:
        """Parse a line. An invalid line becomes a row with an error."""
        if not self._as_json:
            return PromptRow(index, prompt=line.replace("\\n", "\n"))
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON, a number too long, or nested too deep
            return PromptRow(index, error=f"not a JSON object: {error}")
        if self._takes_texts and isinstance(values, dict) and all(values.get(name) is None for name in INPUTS):
            values["prompt"] = values.pop("text", None)
        if isinstance(values, dict) and _is_batch_line(values):
            self._unused |= {"body.model"}  # the answers come from the run's model
        elif isinstance(values, dict):
            answered = isinstance(values.get("src"), list)  # tgt is read only if src is a list
            unread = {name for name, is_read in (("tgt", answered), ("document", "query" in values)) if not is_read}
            self._unused |= set(values) - (set(FIELDS) - unread)
        return parse_row(index, values, self._read_batch_line)


def read_prompts(data: str, read_batch_line: ReadBatchLine | None = None) -> Prompts:
    """Return the rows of `data`: a file, standard input (`-`), or a prompt, which is the only row.

    `read_batch_line`: None if the rows may not be lines of an OpenAI batch.

    Raises UserError for missing, unreadable or empty input.
    """
    if data == "-":
        if sys.stdin is None:
            raise UserError("predict.data=- reads standard input, which is closed: pipe the rows in, or give a file")
        lines = Lines(sys.stdin.buffer, "standard input")
        return Prompts(lines, as_json=None, read_batch_line=read_batch_line)
    if not data:
        raise UserError(f"predict.data is empty: {GIVE}")
    if names_a_file(data):
        file = find_file("predict.data", data, FORMS, MISSING)
        return read_file(file, read_batch_line=read_batch_line)
    content = json.dumps({"prompt": data}).encode()
    return _read_twice(lambda: iter([content]), "the prompt", as_json=True)


def read_file(file: DataFile, takes_texts: bool = False, read_batch_line: ReadBatchLine | None = None) -> Prompts:
    """Return the rows of a file. The whole file is read once before its first row is returned, except a named pipe.

    `takes_texts`: whether a row may have its prompt as "text", as in evaluate.data.
    """
    as_json = file.form != ".txt"
    if file.path.is_fifo():
        lines = Lines(file.lines(), file.where)
        return Prompts(lines, as_json, takes_texts=takes_texts, read_batch_line=read_batch_line)
    return _read_twice(file.lines, file.where, as_json, takes_texts, read_batch_line)


def _read_twice(
    open_lines: Callable[[], Iterator[bytes]],
    where: str,
    as_json: bool,
    takes_texts: bool = False,
    read_batch_line: ReadBatchLine | None = None,
) -> Prompts:
    """Return the rows of a file. A first pass checks that all of it is readable, and computes digest and count."""
    first_pass = Lines(open_lines(), where)
    deque(first_pass, maxlen=0)
    return Prompts(Lines(open_lines(), where), as_json, first_pass, takes_texts, read_batch_line)


def _is_json_row(line: str) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and (any(name in row for name in INPUTS) or _is_batch_line(row))


def parse_row(index: int, values: object, read_batch_line: ReadBatchLine | None = None) -> PromptRow:
    """Return the row of a JSON object. An invalid object becomes a row with an error."""
    if not isinstance(values, dict):
        return PromptRow(index, error=f"not a JSON object but {type(values).__name__}")
    is_line = read_batch_line is not None and _is_batch_line(values)
    id = values.get("custom_id" if is_line else "id")
    known_id = id if isinstance(id, str | int) and not isinstance(id, bool) else None
    batch = values if is_line else None
    try:
        if id is not None and known_id is None:
            raise UserError(f"id={shortened(repr(id))} is neither a text nor a number")
        if read_batch_line is not None and is_line:
            values = read_batch_line(values)
        decode, prediction = _checked(values, "decode", dict, {}), values.get("prediction")
        if prediction is not None:
            check_unicode("prediction", _checked(values, "prediction", str))
        names = {name: values[name] for name in ("prefix", "adapter") if values.get(name) is not None}
        for name in names:
            _checked(values, name, str)
        source = {"src": values["src"], "tgt": values.get("tgt", "")} if values.get("src") is not None else None
        prompt_fields = _input(values)
        row = PromptRow(
            index, known_id, decode=decode, **names, prediction=prediction, batch=batch, source=source, **prompt_fields
        )
        check_unicode("id", str(known_id))
        return row
    except Exception as error:
        if isinstance(error.__cause__, ImportError):
            batch = None
        return PromptRow(index, known_id, error=row_error(error, index), batch=batch)


def _is_batch_line(values: dict[str, Any]) -> bool:
    return "custom_id" in values and "body" in values


def _input(values: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in INPUTS if values.get(name) is not None]
    if len(names) != 1:
        raise UserError(f"the row has {' and '.join(names) or 'none'} of {', '.join(INPUTS)}: give exactly one")
    if names == ["src"]:
        return _from_src_tgt(values["src"], values.get("tgt"))
    if names == ["prompt"]:
        return {"prompt": _checked(values, "prompt", str)}
    if names == ["messages"]:
        messages = _checked(values, "messages", list)
        check_messages(messages)
        return {"messages": messages}
    if names == ["query"]:
        if values.get("document") is None:
            raise UserError("the row has a query and no document: give both")
        return {"pair": (_checked(values, "query", str), _checked(values, "document", str))}
    token_ids = _checked(values, "prompt_token_ids", list)
    if wrong := [id for id in token_ids if type(id) is not int or not 0 <= id < MAX_TOKEN_ID]:
        raise UserError(f"prompt_token_ids must be numbers from 0, not {shortened(repr(wrong[0]))}")
    return {"prompt_token_ids": token_ids}


def _from_src_tgt(src: object, tgt: object) -> dict[str, Any]:
    """Convert a PaddleNLP row. If `src` is a text, it is the prompt. If it is a list, its items are rounds of a conversation.

    The last round is the question to answer.
    """
    if isinstance(src, str):
        return {"prompt": src}
    answers = [] if tgt is None else [tgt] if isinstance(tgt, str) else tgt
    if (
        not isinstance(src, list)
        or not src
        or not isinstance(answers, list)
        or not all(isinstance(t, str) for t in [*src, *answers])
    ):
        raise UserError(
            f"src={shortened(repr(src))} tgt={shortened(repr(tgt))} is not allowed: give texts or lists of texts"
        )
    if len(answers) not in (len(src) - 1, len(src)):
        raise UserError(f"src has {len(src)} rounds and tgt {len(answers)}: every round but the last needs its answer")
    messages = []
    for i, question in enumerate(src):
        messages.append({"role": "user", "content": question})
        if i < len(src) - 1:
            messages.append({"role": "assistant", "content": answers[i]})
    return {"messages": messages}


def _checked(values: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, kind):
        raise UserError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")
    return value


def check_unicode(name: str, text: str) -> None:
    """Raise UserError for a text with half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has half a surrogate pair at character {error.start}, which no tokenizer takes: leave it out"
        ) from error


def rows_from_python(prompts: object) -> Iterator[PromptRow]:
    """Yield the rows of a Python caller's input.

    The input is a text, a conversation, a dictionary with the fields of a .jsonl row, or a list or iterator of these.
    """
    is_many = isinstance(prompts, list | tuple | Iterator) and not _is_conversation(prompts)
    return (
        _row_from_python(i, prompt)
        for i, prompt in enumerate(cast(Iterable[object], prompts) if is_many else [prompts])
    )


def _is_conversation(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, dict) and "role" in item for item in value)


def _row_from_python(index: int, item: object) -> PromptRow:
    if isinstance(item, str):
        return PromptRow(index, prompt=item)
    if _is_conversation(item):
        return parse_row(index, {"messages": list(cast(Iterable[object], item))})
    if not isinstance(item, dict):
        forms = f"a text, a list of messages or a dictionary with one of {', '.join(INPUTS)}"
        return PromptRow(index, error=f"of type {type(item).__name__}: give {forms}")
    if unknown := sorted(map(str, set(item) - set(FIELDS))):
        return PromptRow(index, error=f"unknown fields {', '.join(unknown)}: there are {', '.join(FIELDS)}")
    return parse_row(index, item)

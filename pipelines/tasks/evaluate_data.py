"""The texts and the questions of `task=evaluate`: read them, encode the texts, and ask the questions.

Answers are greedy. After white space is stripped, an answer is right if it begins with exactly the expected lines. Text
on further lines is allowed, but not more text on the last expected line.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError
from models.tokenizers import Tokenizer
from pipelines.engine import Engine
from pipelines.jobs.data_files import FORMS, ROWS, DataFile, decoded, find_file
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import FIELDS, Lines, PromptRow, parse_row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    where: str  # name in errors: the file, and the row of a .jsonl
    text: str


@dataclass(frozen=True)
class Question:
    where: str
    row: PromptRow
    answer: str


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    is_right: bool


def read_texts(data: str | Path) -> list[Text]:
    """Return a .txt as one text, and any other file as one text per row.

    Raises UserError for a file or a row without text.
    """
    missing = "is not a file that ends in .txt or .jsonl, .csv or .json, or .gz of these: give one"
    file = find_file("evaluate.data", data, FORMS, missing, columns=("text", "prompt"))
    if file.form == ".txt":
        return [Text(file.where, "".join(decoded(file.lines(), file.where)))]
    texts = []
    for row, values in _read_rows(file, {"text", "prompt", "id"}):
        row_texts = [values[name] for name in ("text", "prompt") if values.get(name) is not None]
        if len(row_texts) != 1 or not isinstance(row_texts[0], str):
            raise UserError(f'{row} needs a text as either "text" or "prompt"')
        texts.append(Text(row, row_texts[0]))
    return texts


def read_questions(data: str | Path) -> list[Question]:
    """Return the questions of a file: rows as for task=predict, with an `answer`.

    Raises UserError for an invalid file or row.
    """
    missing = "is not a file that ends in .jsonl, .csv or .json, or .gz of these: give one"
    file = find_file("evaluate.questions", data, ROWS, missing)
    questions: list[Question] = []
    for row, values in _read_rows(file, {*FIELDS, "answer"} - {"prefix"}):
        prompt, answer = parse_row(len(questions), values), values.get("answer")
        if prompt.error:
            raise UserError(f"{row} cannot be asked: {prompt.error}")
        if prompt.prediction is not None:
            raise UserError(f"{row} has a prediction, which task=evaluate does not use: leave it out")
        if prompt.decode:
            raise UserError(f"{row} has decode settings of its own, but all questions are asked alike: leave them out")
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f'{row} needs its "answer", a text that is not empty, but has {json.dumps(answer)[:40]}')
        questions.append(Question(row, prompt, answer))
    return questions


def _read_rows(file: DataFile, known: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return each row's name for errors, and its values."""
    rows: list[tuple[str, dict[str, Any]]] = []
    unused: set[str] = set()
    for index, line in enumerate(Lines(file.lines(), file.where)):
        name = f"row {index} of {file.where}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON, a number too long, or nested too deep
            raise UserError(f"{name} is not a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{name} is not a JSON object but {type(values).__name__}")
        rows.append((name, values))
        unused |= set(values) - known
    if unused:
        log.warning("%s has fields that are not used: %s", file.where, ", ".join(sorted(unused)))
    return rows


def encode_text(tokenizer: Tokenizer | None, text: Text) -> list[int]:
    """Return the tokens of a text. Raises UserError for a text with fewer than 2 tokens."""
    try:
        token_ids = PromptEncoder(tokenizer, True, "none").encode(PromptRow(0, prompt=text.text)).token_ids
    except UserError as error:
        raise UserError(f"{text.where}: {error}") from error
    if len(token_ids) < 2:
        length = f"{len(token_ids)} token{'' if len(token_ids) == 1 else 's'}"
        raise UserError(f"{text.where} is too short: it is {length}, of which the first is not scored: give at least 2")
    return token_ids


def ask(
    engine: Engine,
    questions: list[Question],
    decode: DecodeConfig,
    on_answer: Callable[[int, int, float], None] = lambda num_done, total, tokens_per_s: None,
) -> list[Answer]:
    """Return the answers to the questions, in order.

    Raises UserError, before any question runs, for a question that the model does not accept.
    """
    encoder = PromptEncoder(engine.tokenizer, add_special_tokens=True, chat_template="auto")
    requests = []
    for i, question in enumerate(questions):
        row = question.row
        try:
            requests.append(engine.request(i, encoder.encode(row).token_ids, decode, adapter=row.adapter))
        except UserError as error:
            raise UserError(f"{question.where} cannot be asked: {error}") from error
    answers: dict[int, Answer] = {}
    start, before = time.perf_counter(), engine.num_generated_tokens
    for num_done, output in enumerate(engine.generate(requests), 1):
        if output.error:
            raise output.error
        number, completion = output.request_id, output.completions[0]
        text = completion.text or ""
        answers[number] = Answer(text, len(completion.token_ids), is_right(text, questions[number].answer))
        tokens_per_s = (engine.num_generated_tokens - before) / (time.perf_counter() - start)
        on_answer(num_done, len(questions), tokens_per_s)
    return [answers[i] for i in range(len(questions))]


def is_right(continuation: str, answer: str) -> bool:
    num_lines = answer.strip().count("\n") + 1
    return "\n".join(continuation.strip().split("\n")[:num_lines]).strip() == answer.strip()

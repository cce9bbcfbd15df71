"""`task=evaluate`: perplexity, divergence from a reference model, accuracy on questions, and lm_eval tasks.

Answers are greedy. After white space is stripped, an answer is right if it begins with exactly the expected lines. Text
on further lines is allowed, but not more text on the last expected line.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import RunConfig, Weights
from conf.tasks import EvaluateConfig
from models.tokenizers import Tokenizer
from pipelines.engine import Engine
from pipelines.jobs import report
from pipelines.jobs.data_files import FORMS, ROWS, DataFile, decoded, find_file
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import FIELDS, Lines, PromptRow, parse_row
from pipelines.jobs.scoring import Scores, score, sliding_windows
from pipelines.loading.build_engine import build_engine
from pipelines.loading.device import prepare_device
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import ReadyModel, resolve_model
from pipelines.loading.quantize.job import float_model

log = logging.getLogger(__name__)

DEFAULT_WINDOW = 512  # tokens
BATCH_SIZE = 16  # questions per batch
GREEDY = {"temperature": 0, "num_beams": 1, "penalty_alpha": 0, "n": 1, "logprobs": None, "prompt_logprobs": None}


@dataclass(frozen=True)
class Text:
    where: str  # name in errors: the file, and the row of a .jsonl
    text: str


@dataclass(frozen=True)
class Question:
    where: str
    row: PromptRow
    answer: str


def run_evaluate(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Measure and write the results.

    Raises UserError, before any file is written, for files, rows and models that cannot be measured.
    """
    data, asked = run.evaluate.data, run.evaluate.questions
    if data is None and asked is None and not run.evaluate.tasks:
        given = "evaluate.data=FILE, evaluate.questions=FILE.jsonl or evaluate.tasks=[NAME]"
        raise UserError(f"there is nothing to evaluate: give {given}, or several of them")
    texts = [] if data is None else read_texts(data)
    questions = [] if asked is None else read_questions(asked)
    if not questions:
        run.decode.check_unset("without evaluate.questions", "leave it out, or ask questions")
    start = time.perf_counter()
    with report.progress_bar() as progress:
        engine = load_engine(run, min(BATCH_SIZE, run.device.max_batched_tokens), progress)
        if engine.tokenizer is None:
            raise UserError("task=evaluate measures on text, but there is no tokenizer: give model.tokenizer=PATH")
        run = _resolved(run, engine)
        token_ids = [_encode(engine.tokenizer, text) for text in texts]
        reference = _load_reference(run, engine, dict(zip(texts, token_ids, strict=True)), progress)
        load_s, start = time.perf_counter() - start, time.perf_counter()
        right = right_answers(engine, questions, run.decode, progress.generated)
        scores = _score(run.evaluate, engine, reference, token_ids, progress) if texts else None
        tasks = _ask_lm_eval(engine, run.evaluate) if run.evaluate.tasks else {}
    metrics = {
        **_quality(scores, right),
        "tasks": tasks,
        "start_s": report.START_S,
        "load_s": load_s,
        "evaluate_s": time.perf_counter() - start,
        "weight_bytes": engine.executor.weight_bytes,
        "peak_memory_bytes": report.peak_memory_of(engine),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, output_dir)


def right_answers(
    engine: Engine,
    questions: list[Question],
    decode: DecodeConfig,
    on_answer: Callable[[int, int, float], None] = lambda num_done, total, tokens_per_s: None,
) -> list[bool]:
    """Return whether each answer is right.

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
    right = [False] * len(questions)
    start, before = time.perf_counter(), engine.num_generated_tokens
    for num_done, output in enumerate(engine.generate(requests), 1):
        if output.error:
            raise output.error
        right[output.request_id] = is_right(output.completions[0].text or "", questions[output.request_id].answer)
        tokens_per_s = (engine.num_generated_tokens - before) / (time.perf_counter() - start)
        on_answer(num_done, len(questions), tokens_per_s)
    return right


def is_right(continuation: str, answer: str) -> bool:
    num_lines = answer.strip().count("\n") + 1
    return "\n".join(continuation.strip().split("\n")[:num_lines]).strip() == answer.strip()


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
        given = [values[name] for name in ("text", "prompt") if values.get(name) is not None]
        if len(given) != 1 or not isinstance(given[0], str):
            raise UserError(f'{row} needs a text as either "text" or "prompt"')
        texts.append(Text(row, given[0]))
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


def _resolved(run: RunConfig, engine: Engine) -> RunConfig:
    """Return the run with unset values from the model.

    Raises UserError for settings that the measures do not support.
    """
    evaluate = run.evaluate
    if evaluate.questions is not None:
        run = replace(run, decode=engine.requests.resolve(run.decode))
        for name, greedy in GREEDY.items():
            if (value := getattr(run.decode, name)) != greedy:
                remedy = "leave it out, or give decode=greedy"
                raise UserError(
                    f"decode.{name}={value} is not used by task=evaluate, whose tokens are greedy: {remedy}"
                )
        engine.requests.check(run.decode)
    if evaluate.data is None:
        return run
    if engine.capabilities.needs_whole_prompt:
        raise UserError(
            "evaluate.data needs a model whose tokens are predicted from those before them, but this one's prompts see themselves "
            "whole, so that a text has no perplexity: give evaluate.questions alone"
        )
    context = engine.config.context
    window = evaluate.window or min(DEFAULT_WINDOW, context.num_tokens)
    stride = evaluate.stride or window
    if window > context.num_tokens:
        raise UserError(
            f"evaluate.window={window} is more than the model takes ({context}): give at most {context.num_tokens}"
        )
    if stride > window:
        raise UserError(f"evaluate.stride={stride} is more than the window, {window} tokens: give at most that")
    return replace(run, evaluate=replace(evaluate, window=window, stride=stride))


def _ask_lm_eval(engine: Engine, evaluate: EvaluateConfig) -> dict[str, dict[str, float]]:
    try:
        from pipelines.tasks.lm_eval import evaluate_tasks
    except ImportError as error:
        raise UserError(f"evaluate.tasks needs the package lm-eval ({error}): pip install 'quintet[eval]'") from error
    return evaluate_tasks(engine, evaluate)


def _encode(tokenizer: Tokenizer | None, text: Text) -> list[int]:
    try:
        token_ids = PromptEncoder(tokenizer, True, "none").encode(PromptRow(0, prompt=text.text)).token_ids
    except UserError as error:
        raise UserError(f"{text.where}: {error}") from error
    if len(token_ids) < 2:
        found = f"{len(token_ids)} token{'' if len(token_ids) == 1 else 's'}"
        raise UserError(f"{text.where} is too short: it is {found}, of which the first is not scored: give at least 2")
    return token_ids


def _score(
    evaluate: EvaluateConfig,
    engine: Engine,
    reference: Engine | None,
    token_ids: list[list[int]],
    progress: report.ProgressSink,
) -> Scores:
    assert evaluate.window is not None
    assert evaluate.stride is not None
    windows = [window for ids in token_ids for window in sliding_windows(ids, evaluate.window, evaluate.stride)]
    total = sum(window.num_scored for window in windows)
    return score(engine, windows, reference, lambda num_tokens: progress.scored(num_tokens, total))


def _load_reference(
    run: RunConfig, engine: Engine, token_ids: dict[Text, list[int]], progress: report.ProgressSink
) -> Engine | None:
    """Load the reference model, not quantised, with the same model.dtype. Raises UserError if its tokenizer differs."""
    path = run.evaluate.reference
    if path == "none":
        return None
    where = f"evaluate.reference={path}"
    # The reference needs a KV cache for one window only.
    model = replace(run.model, path=path, revision=None, weights=Weights.checkpoint, max_length=run.evaluate.window)
    model = float_model(model)
    try:
        device, ready = prepare_device(run.device), ReadyModel(resolve_model(model), model, QuantConfig())
        reference = build_engine(ready, device, run.device, run.parallel, DecodeConfig(), 1, progress)
    except UserError as error:
        raise UserError(f"{where} cannot be loaded: {error}") from error
    if reference.vocab_size != engine.vocab_size:
        sizes = f"{reference.vocab_size} tokens, but the model's {engine.vocab_size}"
        raise UserError(f"{where} has a vocabulary of {sizes}: give the model that this one comes from")
    for text, expected in token_ids.items() if reference.tokenizer else ():
        if _encode(reference.tokenizer, text) != expected:
            what = f"another tokenizer, which reads {text.where} as other tokens"
            raise UserError(f"{where} has {what}: give the model that this one comes from")
    return reference


def _quality(scores: Scores | None, right: list[bool]) -> dict[str, Any]:
    return {
        "nll_per_token": scores and scores.nll_per_token,
        "perplexity": scores and scores.perplexity,
        "kl_mean": scores and scores.kl_mean,
        "top1_agreement": scores and scores.top1_agreement,
        "num_scored_tokens": scores.num_tokens if scores else 0,
        "accuracy": sum(right) / len(right) if right else None,
        "num_questions": len(right),
    }


def _print(metrics: dict[str, Any], output_dir: Path) -> None:
    def shown(name: str, style: str, unit: str = "", factor: float = 1.0) -> str:
        return "-" if metrics[name] is None else f"{metrics[name] * factor:{style}}{unit}"

    report.print_table(
        [
            ("scored tokens", shown("num_scored_tokens", ",.0f")),
            ("negative log likelihood", shown("nll_per_token", ".5f", " per token")),
            ("perplexity", shown("perplexity", ",.4f")),
            ("KL divergence", shown("kl_mean", ".3g")),
            ("equal most likely tokens", shown("top1_agreement", ".2f", " %", 100)),
            ("accuracy", shown("accuracy", ".2f", f" % of {metrics['num_questions']:,}", 100)),
            *(
                (f"{task}, {name}", f"{value:.4f}")
                for task, own in metrics["tasks"].items()
                for name, value in own.items()
            ),
            ("weights", shown("weight_bytes", ",.1f", " MB", 1e-6)),
            ("peak memory", shown("peak_memory_bytes", ",.0f", " MB", 1e-6)),
        ]
    )
    print(f"output: {output_dir}")

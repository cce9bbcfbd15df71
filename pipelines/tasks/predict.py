"""`task=predict`: run every prompt of a job through the engine and write the result files."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.support.terminal import escape_control_chars, escape_line
from conf.tasks import OutputForm, PredictConfig
from models.formats.hub import find_checkpoint
from pipelines.engine import Output
from pipelines.engine.faults import belongs_to_request, row_error
from pipelines.engine.request import ContextLimit, FinishReason
from pipelines.engine.request_factory import too_many_new_tokens
from pipelines.jobs import report
from pipelines.jobs.data_files import expanded, names_a_file
from pipelines.jobs.job import ANSWER, RowJob
from pipelines.jobs.journal import NAME as JOURNAL
from pipelines.jobs.journal import Fingerprint, Journal, dumps, named_folder, open_journal
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import PromptRow, Prompts
from pipelines.jobs.rows import EngineRows, Loaded, Record, Row, RowExecutor, RowRequest
from pipelines.jobs.run_log import FILE
from pipelines.jobs.text_generator import TextGenerator, whole_texts
from pipelines.loading.fingerprint import calibration_fingerprint, file_fingerprint, fingerprint
from pipelines.loading.load_engine import open_engine
from pipelines.tasks.row_tasks import open_prompts, row_executor

if TYPE_CHECKING:
    from pipelines.server.batches.requests import BatchRequests


EXPORTED = "export"  # name of the folder with the exported model, in the run's folder
OWN_FILES = (
    *("predictions.jsonl", "text_generation_result.txt", "batch_output.jsonl", "batch_error.jsonl", "metrics.json"),
    *("config.yaml", "environment.json", JOURNAL, FILE),
)


def run_predict(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Predict every row and write the files.

    Raises UserError in three cases: for wrong settings or input, before any file is written; if the job cannot go on,
    with all finished rows in the journal; if no row could be predicted, after all files are written.
    """
    prompts = open_prompts(run.predict)
    _check_output_file(run.predict, output_dir)
    start = time.perf_counter()
    loaded, parts = _exported(run, output_dir) if run.predict.export else (run, {})
    with row_executor(PredictRows, loaded, prompts) as executor:
        load_s = time.perf_counter() - start
        parts = {"input": prompts.sha256, **executor.loaded.fingerprint, **parts}
        with closing(open_journal(run.predict.resume, output_dir, parts)) as journal:
            run = replace(run, decode=replace(executor.loaded.decode, seed=journal.seed))
            job = PredictJob(executor, journal, run.predict)
            finished = job.complete(prompts, dump(run, journal.folder), load_s)
    first, metrics = finished.first, finished.metrics
    _print(first, metrics, journal.folder)
    for name in filter(None, (run.predict.output_file, run.predict.export and str(journal.folder / EXPORTED))):
        print(escape_line(f"also: {name}"))
    if metrics["num_errors"] == metrics["num_prompts"]:
        raise UserError(f"none of the {metrics['num_prompts']} rows could be predicted; the first: {first[0]['error']}")


def _exported(run: RunConfig, output_dir: Path) -> tuple[RunConfig, Fingerprint]:
    """Return the run of the exported model, and the fingerprint of its source model. A resumed job compares it."""
    from pipelines.tasks.export import run_of_artefact  # here, because it imports torch's compiler

    resume = run.predict.resume
    folder = output_dir if resume in ("auto", "none") else named_folder(resume)
    goes_on = resume != "none" and (folder / JOURNAL).exists()  # the export was finished before the journal began
    model = run.model
    source = find_checkpoint(model.path, True, model.allow_pickle, model.hub, model.revision)
    made_of = file_fingerprint(source, "model") | (
        calibration_fingerprint(run.calibrate, run.quantize.format) if run.quant.needs_calibration else {}
    )
    return run_of_artefact(run, folder / EXPORTED, goes_on), {
        f"export.{name}": value for name, value in made_of.items()
    }


class PredictRows(EngineRows):
    """Computes predictions from prompts."""

    def __init__(
        self, generator: TextGenerator, loaded: Loaded, open_batch: "Callable[[int | None], BatchRequests]"
    ) -> None:
        """`open_batch`: makes the converter for lines of OpenAI batches, from the seed of rows that do not set a seed.

        It raises UserError if the run cannot take such lines.
        """
        super().__init__(generator.engine, loaded)
        self._generator = generator
        self._open_batch = open_batch
        self._batch: BatchRequests | None = None  # set at the first line of a batch

    @classmethod
    def load(
        cls, run: RunConfig, progress: report.ProgressSink = report.NO_PROGRESS, rows: Iterable[PromptRow] = ()
    ) -> "PredictRows":
        source, engine = open_engine(run, run.predict.batch_size, progress)
        run = replace(run, decode=engine.requests.resolve(run.decode))
        engine.requests.check(run.decode)
        engine.requests.prefix(run.predict.prefix)
        settings = run.predict
        encoder = PromptEncoder(
            engine.tokenizer,
            settings.add_special_tokens,
            settings.chat_template,
            truncate=settings.truncate,
            max_tokens=settings.max_prompt_tokens,
        )
        generator = TextGenerator(engine, encoder, settings.prefix, settings.adapter)
        _check_new_tokens(run.decode, engine.config.context, encoder, rows)
        loaded = Loaded(run.decode, fingerprint(run, source, engine), engine.executor.weight_bytes)

        def open_batch(seed: int | None) -> "BatchRequests":
            if settings.max_prompt_tokens is not None:
                raise UserError(
                    "predict.truncate is not used by lines of a batch: leave it out, or give rows of prompts"
                )
            from pipelines.server.batches.requests import BatchRequests  # here: only batches need pydantic

            return BatchRequests(replace(run, decode=replace(run.decode, seed=seed)), source, generator)

        return cls(generator, loaded, open_batch)

    def ask(self, row: PromptRow, seed: int | None) -> RowRequest:
        if row.batch is None:
            return self._generator.request(row, self.loaded.decode, seed)
        self._batch = self._batch or self._open_batch(seed)
        return self._batch.ask(row)

    def record(self, row: PromptRow, row_request: RowRequest, output: Output) -> Record:
        answer = {ANSWER: row_request.answer(output)} if row_request.answer else {}
        result = {"index": row.index, "id": row.id, **self._generator.result(row_request, output), "error": None}
        return {"row": result, **_source(row), **answer}

    @staticmethod
    def failed(row: PromptRow, error: BaseException) -> Record:
        prediction = _error_prediction(row, error)
        if row.batch is None:
            return {"row": prediction, **_source(row)}
        from pipelines.server.batches.answers import refusal  # here: only batches need pydantic

        return {"row": prediction, ANSWER: refusal(row, error)}


class PredictJob(RowJob):
    """A job whose rows become predictions."""

    def __init__(self, executor: RowExecutor, journal: Journal, settings: PredictConfig) -> None:
        super().__init__(executor, journal, settings.max_errors)
        self._output_file, self._output_form = settings.output_file, settings.output_form

    def metrics(self, prompts: Prompts, load_s: float, run_s: float) -> dict[str, Any]:
        totals, counts = self.totals, self.executor.counts()
        return {
            **self.base_metrics(prompts),
            "unused_fields": self._unused_fields(prompts),
            "num_truncated_rows": totals["num_truncated_rows"],
            "num_generated_tokens": totals["num_generated_tokens"],
            "seed": self.journal.seed,
            "start_s": report.START_S,
            "load_s": load_s,
            "generate_s": run_s,
            "tokens_per_s": (totals["num_generated_tokens"] - self.resumed["num_generated_tokens"]) / run_s,
            **report.draft_metrics(counts.drafts),
            "weight_bytes": self.executor.loaded.weight_bytes,
            "peak_memory_bytes": counts.peak_memory_bytes,
        }

    def _unused_fields(self, prompts: Prompts) -> list[str]:
        used = {"tgt"} if self._output_form is OutputForm.paddlenlp else set[str]()
        return [name for name in prompts.unused_fields if name not in used]

    def write(self, records: Callable[[], Iterator[Record]]) -> None:
        folder = self.journal.folder
        rows, texts = (f"{dumps(r['row'])}\n" for r in records()), (f"{whole_texts(r['row'])}\n" for r in records())
        report.write_atomically(folder / "predictions.jsonl", rows)
        report.write_atomically(folder / "text_generation_result.txt", texts)
        if self._output_file is not None:
            is_paddlenlp = self._output_form is OutputForm.paddlenlp
            results = (_paddlenlp_row(r) if is_paddlenlp else r["row"] for r in records())
            report.write_atomically(expanded(self._output_file), (f"{dumps(each)}\n" for each in results))
        if self.totals["num_answers"]:
            for name, is_wanted in (("batch_output.jsonl", True), ("batch_error.jsonl", False)):
                answers = (record[ANSWER] for record in records() if ANSWER in record)
                wanted = (each for each in answers if (each["response"]["status_code"] == 200) is is_wanted)
                report.write_atomically(folder / name, (f"{dumps(each)}\n" for each in wanted))


def _error_prediction(row: PromptRow, error: BaseException) -> Row:
    """Return the result of a failed row. Raises `error` again if the row did not cause it."""
    return {
        "index": row.index,
        "id": row.id,
        "prompt": None if row.prompt is None else row.prompt.encode("utf-8", "replace").decode("utf-8"),
        "text": "",
        "token_ids": [],
        "finish_reason": FinishReason.error.value,
        "num_prompt_tokens": 0,
        "num_generated_tokens": 0,
        "error": row_error(error, row.index),
    }


def _source(row: PromptRow) -> Record:
    return {} if row.source is None else {"source": row.source}


def _paddlenlp_row(record: Record) -> Row:
    """Return a row in the form of PaddleNLP's predictor: `output` is the first text.

    A failed row also has its error.
    """
    row = record["row"]
    source = record.get("source", {"src": row["prompt"] or "", "tgt": ""})
    return {**source, "output": row["text"] or "", **({"error": row["error"]} if row["error"] else {})}


def _check_output_file(settings: PredictConfig, output_dir: Path) -> None:
    if settings.output_file is None:
        return
    file, given = expanded(settings.output_file), f"predict.output_file={settings.output_file}"
    if not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise UserError(f"{given} cannot be written, because {file.parent} is no folder that can be: give another file")
    if file.exists() and not file.is_file():
        raise UserError(f"{given} is not a file: give the name of a file")
    if file.exists() and names_a_file(settings.data or "") and file.samefile(expanded(settings.data or "")):
        raise UserError(f"{given} is predict.data itself, which would be replaced: give another file")
    if file.name in OWN_FILES and file.parent.resolve() in (output_dir.resolve(), expanded(settings.resume).resolve()):
        raise UserError(f"{given} is a file that the run itself writes: give another name")


def _check_new_tokens(
    decode: DecodeConfig, context: ContextLimit, encoder: PromptEncoder, rows: Iterable[PromptRow]
) -> None:
    """Raise UserError if `max_new_tokens` does not fit after any prompt.

    The error names the number that fits after the longest prompt. Prompts that are themselves too long do not count.
    """
    wanted, most = decode.max_new_tokens, context.num_tokens
    if decode.max_length is not None or not isinstance(wanted, int) or wanted < most:
        return
    lengths = []
    for row in rows:
        try:
            lengths.append(len(encoder.encode(row).token_ids))
        except BaseException as error:  # an invalid row has no length
            if not belongs_to_request(error):
                raise
    longest = max((length for length in lengths if length < most), default=None)
    raise too_many_new_tokens(wanted, longest, context)


def _print(rows: list[Row], metrics: dict[str, Any], output_dir: Path) -> None:
    for row in rows:
        print(escape_control_chars(f"[{row['index']}] {row['prompt'] or ''}"))
        if row["error"]:
            print(escape_line(f" -> error: {row['error']}"))
            continue
        for one in row.get("completions", [row]):
            print(escape_control_chars(f" -> {one['text'] if one['text'] is not None else one['token_ids']}"))
    if metrics["num_prompts"] > len(rows):
        print(f"... and {metrics['num_prompts'] - len(rows)} more")
    if metrics["num_truncated_rows"]:
        print(f"rows of which tokens were left out, by predict.max_prompt_tokens: {metrics['num_truncated_rows']}")
    if metrics["unused_fields"]:
        print(escape_line(f"fields of the rows that are not used: {', '.join(metrics['unused_fields'])}"))
    print()
    report.print_table(
        [
            (
                "prompts",
                f"{metrics['num_prompts']} ({metrics['num_errors']} with errors, {metrics['num_blank_lines']} blank lines skipped)",
            ),
            (
                "prompt tokens",
                f"{metrics['num_prompt_tokens']:,} ({metrics['num_cached_tokens']:,} from the prefix cache)",
            ),
            ("generated tokens", f"{metrics['num_generated_tokens']:,}"),
            ("start (imports)", "-" if metrics["start_s"] is None else f"{metrics['start_s']:.2f} s"),
            ("load", f"{metrics['load_s']:.2f} s"),
            ("generate", f"{metrics['generate_s']:.2f} s"),
            ("speed", f"{metrics['tokens_per_s']:,.1f} tokens/s"),
            *report.draft_lines(metrics),
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(f"output: {output_dir}")

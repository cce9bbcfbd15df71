"""`task=predict`: run every prompt of a job through the engine and write the result files."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.schema import RunConfig
from conf.support.terminal import escape_control_chars, escape_line
from conf.tasks import OutputForm, PredictConfig
from pipelines.jobs import report
from pipelines.jobs.data_files import expanded, names_a_file
from pipelines.jobs.job import RowJob
from pipelines.jobs.journal import NAME as JOURNAL
from pipelines.jobs.journal import Fingerprint, Journal, dumps, open_journal
from pipelines.jobs.prompts import Prompts
from pipelines.jobs.rows import ANSWER, Record, Row, RowExecutor
from pipelines.jobs.run_log import FILE
from pipelines.jobs.text_generator import whole_texts
from pipelines.tasks.predict_rows import PredictRows
from pipelines.tasks.row_tasks import open_prompts, row_executor

EXPORTED = "export"  # name of the folder with the exported model, in the run's folder
OWN_FILES = (
    *("predictions.jsonl", "text_generation_result.txt", "batch_output.jsonl", "batch_error.jsonl", "metrics.json"),
    *("config.yaml", "environment.json", report.LOCK, JOURNAL, FILE),
)


def run_predict(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Predict every row and write the files.

    Raises UserError in three cases: for wrong settings or input, before any file is written; if the job cannot go on,
    with all finished rows in the journal; if no row could be predicted, after all files are written.
    """
    prompts = open_prompts(run.predict)
    _check_output_file(run.predict, output_dir)
    start = time.perf_counter()
    loaded, parts = run, Fingerprint()
    if run.predict.export:
        from pipelines.tasks.predict_export import exported_run  # here, because it imports torch's compiler

        loaded, parts = exported_run(run, output_dir, EXPORTED)
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


class PredictJob(RowJob):
    """A job whose rows become predictions."""

    def __init__(self, executor: RowExecutor, journal: Journal, settings: PredictConfig) -> None:
        super().__init__(executor, journal, settings.max_errors)
        self._output_file, self._output_form = settings.output_file, settings.output_form

    def metrics(self, prompts: Prompts, load_s: float, run_s: float) -> dict[str, Any]:
        totals, counts, divergence = self.totals, self.executor.counts(), self.executor.loaded.divergence
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
            "probe": divergence and asdict(divergence),
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
            report.write_atomically(expanded(self._output_file), (f"{dumps(result)}\n" for result in results))
        if self.totals["num_answers"]:
            for name, is_success in (("batch_output.jsonl", True), ("batch_error.jsonl", False)):
                answers = (record[ANSWER] for record in records() if ANSWER in record)
                file_answers = (
                    answer for answer in answers if (answer["response"]["status_code"] == 200) is is_success
                )
                report.write_atomically(folder / name, (f"{dumps(answer)}\n" for answer in file_answers))


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
    file, setting = expanded(settings.output_file), f"predict.output_file={settings.output_file}"
    if not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise UserError(
            f"{setting} cannot be written, because the folder {file.parent} is missing or read-only: give another file"
        )
    if file.exists() and not file.is_file():
        raise UserError(f"{setting} is not a file: give the name of a file")
    if file.exists() and names_a_file(settings.data or "") and file.samefile(expanded(settings.data or "")):
        raise UserError(f"{setting} is predict.data itself, which would be replaced: give another file")
    if file.name in OWN_FILES and file.parent.resolve() in (output_dir.resolve(), expanded(settings.resume).resolve()):
        raise UserError(f"{setting} is a file that the run itself writes: give another name")


def _print(rows: list[Row], metrics: dict[str, Any], output_dir: Path) -> None:
    for row in rows:
        print(escape_control_chars(f"[{row['index']}] {row['prompt'] or ''}"))
        if row["error"]:
            print(escape_line(f" -> error: {row['error']}"))
            continue
        for completion in row.get("completions", [row]):
            print(
                escape_control_chars(
                    f" -> {completion['text'] if completion['text'] is not None else completion['token_ids']}"
                )
            )
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

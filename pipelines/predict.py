"""`task=predict`: every prompt of a job through the engine, and the files that it leaves."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.terminal import visible, visible_line
from pipelines import report
from pipelines.device import prepare_device
from pipelines.engine import Completion, Engine, Output, Request
from pipelines.engine.faults import belongs_to_request, row_error
from pipelines.engine.request import FinishReason, SamplingParams, TokenLogprobs
from pipelines.engine.request_factory import too_many_new_tokens
from pipelines.fingerprint import fingerprint
from pipelines.interrupt import Interrupted, Interruption, interruption
from pipelines.journal import ANEW, Journal, dumps, named_folder, open_journal
from pipelines.loading import load_engine_on
from pipelines.opening import open_source
from pipelines.prompts import GIVE, PromptEncoder, PromptRow, Prompts, read_prompts

PRINTED = 8  # rows that are shown at the end; all are in the files

Row = dict[str, Any]
"""A row of predictions.jsonl."""


def run_predict(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Raises UserError before anything is written, with all finished rows kept where the job cannot go on, and after all files
    are there if not a single row could be predicted."""
    if run.predict.data is None:
        raise UserError(f"predict.data is missing: {GIVE}")
    if run.predict.resume not in ("auto", "none"):
        named_folder(run.predict.resume)
    prompts = read_prompts(run.predict.data)
    start = time.perf_counter()
    with report.progress_bar() as progress:
        device, source = prepare_device(run.device), open_source(run.model)
        engine = load_engine_on(device, run, source, run.predict.batch_size, progress)
    run = replace(run, decode=engine.requests.resolve(run.decode))
    engine.requests.check(run.decode)
    encoder = PromptEncoder(engine.tokenizer, run.predict.add_special_tokens, run.predict.chat_template)
    _check_new_tokens(run, engine, encoder, prompts)
    load_s = time.perf_counter() - start
    with closing(open_journal(run.predict.resume, output_dir, fingerprint(run, source, engine, prompts))) as journal:
        run = replace(run, decode=replace(run.decode, seed=journal.seed))
        job = PredictJob(run, engine, encoder, journal)
        if journal.num_rows:
            print(f"resuming {journal.folder}: {journal.num_rows} rows are done", file=sys.stderr)
        try:
            with journal.writing():
                report.write_run(journal.folder, dump(run, journal.folder), {})
            with interruption() as signals:
                generate_s = _generate(job, prompts, signals)
                metrics = _metrics(job, prompts, load_s, generate_s, report.peak_memory_bytes(engine.device))
                _write(journal, metrics, signals)
        except Interrupted:
            journal.sync()
            print(f"interrupted: {journal.kept}", file=sys.stderr)
            raise
        first = [record["row"] for record in islice(journal.records(), PRINTED)]
        journal.remove()
    _print(first, metrics, journal.folder)
    if metrics["num_errors"] == metrics["num_prompts"]:
        raise UserError(f"none of the {metrics['num_prompts']} rows could be predicted; the first: {first[0]['error']}")


class PredictJob:
    """Rows in, predictions into the journal as they finish. A bad row becomes an error and does not stop the others.

    Of the rows it holds only those that run.
    """

    def __init__(self, run: RunConfig, engine: Engine, encoder: PromptEncoder, journal: Journal) -> None:
        self._run = run
        self.engine = engine
        self._encoder = encoder
        self._journal = journal
        self._running: dict[int, tuple[PromptRow, str | None, SamplingParams]] = {}
        self._num_errors, self._first_error = 0, ""
        self.totals: Counter[str] = Counter()
        for record in journal.read():  # what an earlier process did
            self.totals.update(_counts(record))
        self.resumed = self.totals.copy()

    @property
    def seed(self) -> int | None:
        """Of the rows that sample and name no other."""
        return self._run.decode.seed

    def run(self, prompts: Prompts, signals: Interruption, on_step: Callable[[], None]) -> None:
        """Every row that the journal does not have. Raises Interrupted after a step, and UserError where the job cannot go on."""

        def after_step() -> None:
            on_step()
            signals.check()

        for output in self.engine.generate(self._requests(signals.checked(prompts)), on_step=after_step):
            row, prompt, params = self._running.pop(output.request_id)
            failed = _error_prediction(row, output.error) if output.error else None
            self._finish(row, failed or _prediction(row, prompt, params, output), output.num_cached_tokens)
        self._journal.sync()

    def _requests(self, rows: Iterator[PromptRow]) -> Iterator[Request]:
        for row in self._undone(rows):
            try:
                prompt = self._encoder.encode(row)
                request = self.engine.request(row.index, prompt.token_ids, self._decode_of(row))
            except BaseException as error:
                self._finish(row, _error_prediction(row, error))
                continue
            self._running[row.index] = row, prompt.text, request.params
            yield request

    def _decode_of(self, row: PromptRow) -> DecodeConfig:
        """The job's settings with the row's own; a row whose seed is null has the job's. Raises UserError."""
        decode = self._run.decode.replaced(row.decode)
        return replace(decode, seed=self._run.decode.seed) if decode.seed is None else decode

    def _undone(self, rows: Iterator[PromptRow]) -> Iterator[PromptRow]:
        """Rows that the journal does not have. Those before its last one wait until that one has shown the input to be the same."""
        waiting: list[PromptRow] = []  # no more than ran at once when the job ended
        num_read = 0
        for row in rows:
            num_read = row.index + 1
            if row.index >= self._journal.end:
                yield from waiting
                waiting.clear()
                yield row
            elif not self._journal.has(row.index, row.digest):
                waiting.append(row)
        if num_read < self._journal.end:
            have = f"{self._journal.folder} has a row {self._journal.end - 1} that is done"
            raise UserError(f"the input has {num_read} rows, but {have}: give the same input, or {ANEW}")
        yield from waiting

    def _finish(self, row: PromptRow, prediction: Row, num_cached_tokens: int = 0) -> None:
        record = {"digest": row.digest, "num_cached_tokens": num_cached_tokens, "row": prediction}
        self._journal.append(record)
        self.totals.update(_counts(record))
        if prediction["error"] is None:
            return
        self._num_errors += 1
        self._first_error = self._first_error or f"row {row.index}: {prediction['error']}"
        most = self._run.predict.max_errors
        if most is not None and self._num_errors > most:
            self._journal.sync()
            what = f"more than predict.max_errors={most} rows failed; the first is {self._first_error}"
            raise UserError(f"{what}; {self._journal.kept}")


def _prediction(row: PromptRow, prompt: str | None, params: SamplingParams, output: Output) -> Row:
    completions = [_completion(completion) for completion in output.completions]
    first = dict(completions[0])
    logprobs = {"logprobs": first.pop("logprobs")} if "logprobs" in first else {}
    return {
        "index": row.index,
        "id": row.id,
        "prompt": prompt,
        **first,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_generated_tokens": sum(len(completion.token_ids) for completion in output.completions),
        **({"seed": params.seed} if params.samples else {}),
        **logprobs,
        **({"completions": completions} if len(completions) > 1 else {}),
        **({} if output.prompt_logprobs is None else {"prompt_logprobs": _logprobs(output.prompt_logprobs)}),
        "error": None,
    }


def _completion(completion: Completion) -> Row:
    values: Row = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason.value,
    }
    if completion.score is not None:
        values["score"] = completion.score
    if completion.logprobs is not None:
        values["logprobs"] = _logprobs(completion.logprobs)
    return values


def _logprobs(steps: list[TokenLogprobs]) -> list[dict[str, dict[str, float]]]:
    return [
        {str(token): {"logprob": logprob, "rank": step.ranks[token]} for token, logprob in step.logprobs.items()}
        for step in steps
    ]


def _error_prediction(row: PromptRow, error: BaseException) -> Row:
    """Raises the exception again where it does not belong to the row."""
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


def _counts(record: dict[str, Any]) -> dict[str, int]:
    row = record["row"]
    return {
        "num_prompts": 1,
        "num_errors": int(row["error"] is not None),
        "num_prompt_tokens": row["num_prompt_tokens"],
        "num_cached_tokens": record["num_cached_tokens"],
        "num_generated_tokens": row["num_generated_tokens"],
    }


def _check_new_tokens(run: RunConfig, engine: Engine, encoder: PromptEncoder, prompts: Prompts) -> None:
    """Raises UserError for more new tokens than fit after any prompt, with the number that fits after the longest one that fits itself."""
    wanted, most = run.decode.max_new_tokens, engine.context.num_tokens
    if run.decode.max_length is not None or not isinstance(wanted, int) or wanted < most:
        return
    lengths = []
    for row in () if prompts.num_rows is None else prompts:  # standard input can be read only once
        try:
            lengths.append(len(encoder.encode(row).token_ids))
        except BaseException as error:  # a bad row has no length
            if not belongs_to_request(error):
                raise
    longest = max((length for length in lengths if length < most), default=None)
    raise too_many_new_tokens(wanted, longest, engine.context)


def _generate(job: PredictJob, prompts: Prompts, signals: Interruption) -> float:
    """All rows, with a progress bar; seconds."""
    start = time.perf_counter()
    with report.progress_bar() as progress:

        def show_progress() -> None:
            speed = job.engine.num_generated_tokens / (time.perf_counter() - start)
            progress.generated(job.totals["num_prompts"], prompts.num_rows, speed)

        job.run(prompts, signals, show_progress)
    return time.perf_counter() - start


def _metrics(job: PredictJob, prompts: Prompts, load_s: float, generate_s: float, peak_memory: int) -> dict[str, Any]:
    """Of all rows, also of those that were done before; times and speed of this process alone."""
    totals, resumed = job.totals, job.resumed
    return {
        "num_prompts": totals["num_prompts"],
        "num_resumed_rows": resumed["num_prompts"],
        "num_errors": totals["num_errors"],
        "num_blank_lines": prompts.num_blank_lines,
        "unused_fields": prompts.unused_fields,
        "num_prompt_tokens": totals["num_prompt_tokens"],
        "num_cached_tokens": totals["num_cached_tokens"],
        "num_generated_tokens": totals["num_generated_tokens"],
        "seed": job.seed,
        "start_s": report.START_S,
        "load_s": load_s,
        "generate_s": generate_s,
        "tokens_per_s": (totals["num_generated_tokens"] - resumed["num_generated_tokens"]) / generate_s,
        "weight_bytes": job.engine.runner.weight_bytes,
        "peak_memory_bytes": peak_memory,
    }


def _write(journal: Journal, metrics: dict[str, Any], signals: Interruption) -> None:
    def rows() -> Iterator[Row]:
        return (record["row"] for record in signals.checked(journal.records()))

    folder = journal.folder
    with journal.writing():
        report.write_atomically(folder / "predictions.jsonl", (f"{dumps(row)}\n" for row in rows()))
        report.write_atomically(folder / "text_generation_result.txt", (f"{_texts(row)}\n" for row in rows()))
        report.write_atomically(folder / "metrics.json", [json.dumps(metrics, indent=2) + "\n"])


def _texts(row: Row) -> dict[str, list[str]]:
    return {
        "text_generation_text": [(row["prompt"] or "") + (one["text"] or "") for one in row.get("completions", [row])]
    }


def _print(rows: list[Row], metrics: dict[str, Any], output_dir: Path) -> None:
    for row in rows:
        print(visible(f"[{row['index']}] {row['prompt'] or ''}"))
        if row["error"]:
            print(visible_line(f" -> error: {row['error']}"))
            continue
        for one in row.get("completions", [row]):
            print(visible(f" -> {one['text'] if one['text'] is not None else one['token_ids']}"))
    if metrics["num_prompts"] > len(rows):
        print(f"... and {metrics['num_prompts'] - len(rows)} more")
    if metrics["unused_fields"]:
        print(visible_line(f"fields of the rows that are not used: {', '.join(metrics['unused_fields'])}"))
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
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(f"output: {output_dir}")

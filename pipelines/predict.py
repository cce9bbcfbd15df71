"""`task=predict`: every prompt of a job through the engine, and the files that it leaves."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.schema import RunConfig
from pipelines import report
from pipelines.engine import Engine, Output, Request
from pipelines.engine.request import FinishReason, TokenLogprobs
from pipelines.loading import load_engine
from pipelines.prompts import PromptEncoder, PromptRow, Prompts, read_prompts

PRINTED = 8  # rows that are shown at the end; all are in the files


@dataclass(frozen=True)
class Prediction:
    """A row of predictions.jsonl."""

    index: int
    id: str | int | None
    prompt: str | None
    text: str | None
    token_ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    num_generated_tokens: int
    logprobs: list[TokenLogprobs] | None
    error: str | None

    def to_json(self) -> str:
        values: dict[str, Any] = dict(vars(self))
        if self.logprobs is None:
            del values["logprobs"]
        else:
            values["logprobs"] = [
                {
                    str(token): {"logprob": logprob, "rank": step.ranks[token]}
                    for token, logprob in step.logprobs.items()
                }
                for step in self.logprobs
            ]
        # Half a surrogate pair, as an id or an error may quote one, becomes its JSON escape.
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def run_predict(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Raises UserError before anything is written, and after all files are there if not a single row could be predicted."""
    if run.predict.data is None:
        raise UserError("predict.data is missing: give a prompt, a .txt, a .jsonl, or - for stdin")
    prompts = read_prompts(run.predict.data)
    with report.progress_bar() as progress:
        start = time.perf_counter()
        engine = load_engine(run, run.predict.batch_size, progress.loaded)
        run = replace(run, decode=engine.resolve(run.decode))
        engine.check(run.decode)
        job = PredictJob(run, engine)
        loaded = time.perf_counter()
        predictions: list[Prediction | None] = [None] * len(prompts.rows)

        def show_progress() -> None:
            speed = engine.num_generated_tokens / (time.perf_counter() - loaded)
            progress.generated(job.num_predicted, len(predictions), speed)

        for prediction in job.predict(prompts.rows, show_progress):
            predictions[prediction.index] = prediction
        seconds = time.perf_counter() - loaded
    rows = [prediction for prediction in predictions if prediction is not None]
    metrics = _metrics(
        prompts, rows, job.num_cached_tokens, report.peak_memory_bytes(engine.device), loaded - start, seconds
    )
    _write(output_dir, dump(run, output_dir), rows, metrics)
    _print(rows, prompts, metrics, output_dir)
    if metrics["num_errors"] == len(rows):
        raise UserError(f"none of the {len(rows)} rows could be predicted; the first: {rows[0].error}")


class PredictJob:
    """Rows in, predictions out as they finish; a bad row becomes an error and does not stop the others."""

    def __init__(self, run: RunConfig, engine: Engine) -> None:
        self._run = run
        self._engine = engine
        self.num_predicted = 0
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache spared so far
        self._encoder = PromptEncoder(engine.tokenizer, run.predict.add_special_tokens, run.predict.chat_template)

    def predict(self, rows: list[PromptRow], on_step: Callable[[], None]) -> Iterator[Prediction]:
        texts: dict[int, str | None] = {}
        errors: list[Prediction] = []

        def requests() -> Iterator[Request]:
            for row in rows:
                try:
                    prompt = self._encoder.encode(row)
                    texts[row.index] = prompt.text
                    decode = self._run.decode.replaced(row.decode)
                    yield self._engine.request(row.index, prompt.token_ids, decode)
                except UserError as error:
                    errors.append(_error_prediction(row, str(error)))

        for output in self._engine.generate(requests(), on_step=on_step):
            yield from errors
            errors.clear()
            self.num_predicted += 1
            self.num_cached_tokens += output.num_cached_tokens
            yield _prediction(rows[output.request_id], texts.pop(output.request_id), output)
        yield from errors


def _prediction(row: PromptRow, prompt: str | None, output: Output) -> Prediction:
    completion = output.completions[0]
    return Prediction(
        index=row.index,
        id=row.id,
        prompt=prompt,
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason.value,
        num_prompt_tokens=output.num_prompt_tokens,
        num_generated_tokens=len(completion.token_ids),
        logprobs=completion.logprobs,
        error=None,
    )


def _error_prediction(row: PromptRow, error: str) -> Prediction:
    prompt = None if row.prompt is None else row.prompt.encode("utf-8", "replace").decode("utf-8")
    return Prediction(row.index, row.id, prompt, "", [], FinishReason.error.value, 0, 0, None, error)


def _metrics(
    prompts: Prompts, rows: list[Prediction], num_cached_tokens: int, peak_memory: int, load_s: float, generate_s: float
) -> dict[str, Any]:
    num_generated = sum(row.num_generated_tokens for row in rows)
    return {
        "num_prompts": len(rows),
        "num_errors": sum(row.error is not None for row in rows),
        "num_blank_lines": prompts.num_blank_lines,
        "unused_fields": list(prompts.unused_fields),
        "num_prompt_tokens": sum(row.num_prompt_tokens for row in rows),
        "num_cached_tokens": num_cached_tokens,
        "num_generated_tokens": num_generated,
        "load_s": load_s,
        "generate_s": generate_s,
        "tokens_per_s": num_generated / generate_s,
        "peak_memory_bytes": peak_memory,
    }


def _write(output_dir: Path, config_yaml: str, rows: list[Prediction], metrics: dict[str, Any]) -> None:
    texts = [{"text_generation_text": [(row.prompt or "") + (row.text or "")]} for row in rows]
    files = {
        "text_generation_result.txt": "".join(f"{text}\n" for text in texts),
        "metrics.json": json.dumps(metrics, indent=2) + "\n",
        "predictions.jsonl": "".join(row.to_json() + "\n" for row in rows),
    }
    report.write_run(output_dir, config_yaml, files)


def _print(rows: list[Prediction], prompts: Prompts, metrics: dict[str, Any], output_dir: Path) -> None:
    for row in rows[:PRINTED]:
        print(f"[{row.index}] {row.prompt or ''}")
        print(f" -> error: {row.error}" if row.error else f" -> {row.text if row.text is not None else row.token_ids}")
    if len(rows) > PRINTED:
        print(f"... and {len(rows) - PRINTED} more")
    if prompts.unused_fields:
        print(f"fields of the rows that are not used: {', '.join(prompts.unused_fields)}")
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
            ("load", f"{metrics['load_s']:.2f} s"),
            ("generate", f"{metrics['generate_s']:.2f} s"),
            ("speed", f"{metrics['tokens_per_s']:,.1f} tokens/s"),
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(f"output: {output_dir}")

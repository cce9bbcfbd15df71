"""`task=verify`: rows of a finished job run again with other batches, threads, chunks, drafts and preemptions.

None of these may change a result. `certificate.json` says what was varied, and the first difference of each variation.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from conf.errors import Difference, UserError
from conf.schema import DeviceConfig, RunConfig
from conf.speculation import Speculate, SpeculationConfig
from conf.support.terminal import escape_line
from pipelines.engine import Engine, Output
from pipelines.engine.request_factory import max_blocks
from pipelines.jobs import report
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import EngineRows, Row, Variation
from pipelines.jobs.run_lock import hash_file
from pipelines.loading.device import prepare_device
from pipelines.tasks.row_tasks import open_prompts
from pipelines.tasks.verify_job import changes_since, check_settings, finished_job, of_folder
from pipelines.tasks.verify_rows import KINDS, difference_of, result_of, saved_rows

CERTIFICATE = "certificate.json"
CHUNKS = (33, 256)  # token budgets of a step: less than a block's multiple, and less than most engines'
THREADS = (1, 2, 3)
PREEMPTION = "preemption"
WIDTH = 22  # of a check's name
Rows = dict[int, Row]
"""Results by row index."""


@dataclass(frozen=True)
class Check:
    """One way to run the rows again."""

    name: str
    variation: Variation = field(default_factory=Variation)
    threads: int | None = None
    """Threads of the CPU operators; None: the job's."""
    preempts: bool = False
    """Whether the KV cache shrinks first to the blocks of the largest request, so that rows are preempted."""


def run_verify(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Run sampled rows of `verify.folder` again under each check, and write the certificate.

    Raises Difference, after the certificate is written, if a row differs. Raises UserError, before any file is written,
    for a folder that is not a finished job over rows, and if its model or its data is gone or has changed.
    """
    check_settings(run)
    folder = Path(run.verify.folder or "").expanduser().absolute()
    job = finished_job(folder)
    with of_folder(folder):
        prompts = open_prompts(job.predict)
        num_rows, saved = saved_rows(folder, job.task, run.verify.rows, run.verify.seed)
        chosen = _inputs(prompts, num_rows, saved)
        changes = changes_since(folder, job)
        size = min(max(len(chosen), job.predict.batch_size), job.device.max_batched_tokens)
        with report.progress_bar() as progress:
            rows = KINDS[job.task].rows.load(replace(job, predict=replace(job.predict, batch_size=size)), progress)
        print(f"rows: {len(saved)} of {num_rows}", flush=True)
        results = [_result(rows, check, job, chosen, saved) for check in _checks(job, rows.engine)]
    different = [result for result in results if not result["equal"]]
    certificate = {
        "folder": str(folder),
        "task": job.task.name,
        "results": {name: hash_file(folder / name).sha256 for name in KINDS[job.task].files},
        "changes": changes,
        "seed": run.verify.seed,
        "num_rows_of_job": num_rows,
        "rows": sorted(saved),
        "equal": not different,
        "checks": results,
    }
    config = dump(run, output_dir)
    report.write_run(output_dir, config, {CERTIFICATE: json.dumps(certificate, indent=2) + "\n"})
    print(escape_line(f"output: {output_dir / CERTIFICATE}"))
    if different:
        first = f"{different[0]['name']}: {different[0]['difference']['line']}"
        raise Difference(f"different: {len(different)} of {len(results)} checks of {folder}; the first, {first}")


def _inputs(prompts: Any, num_rows: int, saved: Rows) -> list[PromptRow]:
    """Return the input rows of the saved results. Raises UserError if the data has another number of rows."""
    if prompts.num_rows != num_rows:
        raise UserError(f"its data has {prompts.num_rows} rows now, but its results {num_rows}: restore the data")
    return [row for row in islice(prompts, max(saved) + 1) if row.index in saved]


def _checks(job: RunConfig, engine: Engine) -> Iterator[Check]:
    """Yield the checks that apply to the job. The last one shrinks the KV cache for good."""
    yield Check("again")
    for size in (1, 3):
        yield Check(f"batch_size={size}", Variation(max_num_requests=size))
    if engine.device.type == "cpu" and not job.parallel.mode.divides:
        for number in [number for number in THREADS if number != job.device.threads][:2]:
            yield Check(f"threads={number}", threads=number)
    if not engine.capabilities.needs_whole_prompt:
        for size in CHUNKS:
            yield Check(f"max_batched_tokens={size}", Variation(max_tokens=size))
    yield Check("prefix_cache=false", Variation(params={"prefix_cache": False}))
    if Speculate.ngram not in engine.config.unavailable_proposers and job.task.name == "predict":
        drafts = {"speculate": Speculate.ngram, "speculation": SpeculationConfig(min_ngram=1, adaptive=False)}
        yield Check("speculate=ngram", Variation(params=drafts))
        if job.decode.speculate is not Speculate.none:
            yield Check("speculate=none", Variation(params={"speculate": Speculate.none}))
    yield Check(PREEMPTION, preempts=True)


def _result(rows: EngineRows, check: Check, job: RunConfig, chosen: list[PromptRow], saved: Rows) -> dict[str, Any]:
    """Run the rows by `check`, and return its entry of the certificate. Raises UserError if the data has changed."""
    engine, num_preemptions = rows.engine, 0

    def observe(output: Output) -> None:
        nonlocal num_preemptions
        num_preemptions += output.num_preemptions

    if check.preempts:
        _shrink(rows, chosen, job.decode.seed)
    source, again = iter(chosen), Rows()
    drafts = engine.speculator.counts
    with _threads(job.device, check.threads):
        for records in rows.steps(
            lambda: next(source, None), job.decode.seed, replace(check.variation, observe=observe)
        ):
            again |= {record["row"]["index"]: result_of(record) for record in records}
    differences = (difference_of(index, saved[index], again[index]) for index in sorted(saved))
    difference = next(filter(None, differences), None)
    result = {
        "name": check.name,
        "num_rows": len(again),
        "num_preemptions": num_preemptions,
        "num_accepted_tokens": engine.speculator.counts.since(drafts).num_accepted_tokens,
        "equal": difference is None,
        "difference": difference,
    }
    _print(result)
    return result


@contextmanager
def _threads(device: DeviceConfig, num_threads: int | None) -> Iterator[None]:
    if num_threads is None:
        yield
        return
    prepare_device(replace(device, threads=num_threads))
    try:
        yield
    finally:
        prepare_device(device)


def _shrink(rows: EngineRows, chosen: list[PromptRow], seed: int | None) -> None:
    """Leave only the KV cache blocks that the largest request needs."""
    engine, largest = rows.engine, 1
    for row in chosen:
        try:
            request = rows.ask(row, seed).request
        except UserError:  # the row's result is this error
            continue
        prompt, prefix = len(request.prompt_token_ids), request.prefix.num_tokens
        threshold = engine.capabilities.long_rope_threshold
        largest = max(largest, max_blocks(request.params, prompt, engine.block_size, threshold, prefix))
    engine.pin(max(0, engine.num_free_blocks - largest))


def _print(result: dict[str, Any]) -> None:
    text = "equal" if result["equal"] else f"different: {result['difference']['line']}"
    if result["name"] == PREEMPTION:
        text += f" ({result['num_preemptions']} preemptions)"
    if result["num_accepted_tokens"]:
        text += f" ({result['num_accepted_tokens']} drafts accepted)"
    print(f"{result['name']:<{WIDTH}}  {escape_line(text)}", flush=True)

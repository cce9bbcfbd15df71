"""`task=evaluate`: perplexity, divergence from a reference model, accuracy on questions, and lm_eval tasks."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig, Weights
from conf.tasks import EvaluateConfig
from pipelines.engine import Engine
from pipelines.jobs import report
from pipelines.jobs.scoring import Scores, Window, score, sliding_windows
from pipelines.loading.load_engine import load_engine, load_float_engine
from pipelines.tasks.evaluate_baseline import Baseline, read_baseline
from pipelines.tasks.evaluate_compare import (
    COMPARISON,
    PICTURE,
    Comparison,
    changed_table,
    check_gate,
    check_gate_windows,
    compare,
    comparison_table,
    draw_comparison,
)
from pipelines.tasks.evaluate_data import Question, Text, ask, encode_text, read_questions, read_texts
from pipelines.tasks.evaluate_halving import open_race, score_in_parts
from pipelines.tasks.evaluate_samples import (
    DOCUMENT,
    QUESTION,
    SAMPLES,
    WINDOW,
    Sample,
    by_key,
    quality,
    question_inputs,
    question_samples,
    window_inputs,
    window_samples,
    write_samples,
)
from pipelines.tasks.sweep_jobs import SHARE

DEFAULT_WINDOW = 512  # tokens
BATCH_SIZE = 16  # questions per batch
GREEDY = {"temperature": 0, "num_beams": 1, "penalty_alpha": 0, "n": 1, "logprobs": None, "prompt_logprobs": None}


def run_evaluate(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Measure and write the results. Raises Difference, after they are written, if evaluate.gate is not passed.

    Raises UserError, before any file is written, for files, rows and models that cannot be measured.
    """
    texts, questions = _read_data(run)
    asked = question_inputs(questions)
    baseline = _read_baseline(run.evaluate, asked)
    start = time.perf_counter()
    with report.progress_bar() as progress:
        engine = load_engine(run, min(BATCH_SIZE, run.device.max_batched_tokens), progress)
        if engine.tokenizer is None:
            raise UserError("task=evaluate measures on text, but there is no tokenizer: give model.tokenizer=PATH")
        if questions:
            run = replace(run, decode=_greedy(run.decode, engine))
        if texts:
            run = replace(run, evaluate=_windowed(run.evaluate, engine))
        token_ids = [encode_text(engine.tokenizer, text) for text in texts]
        windows = _windows(run.evaluate, token_ids)
        read = window_inputs(windows)
        check_gate_windows(run.evaluate.gate or {}, len(read))
        if baseline:
            baseline.check_data(WINDOW, read)
        reference = _load_reference(run, engine, dict(zip(texts, token_ids, strict=True)), progress)
        if baseline:
            baseline.check_reference(run.evaluate.reference, run.model)
        load_s, start = time.perf_counter() - start, time.perf_counter()
        scores, scored = _score(run, windows, read, engine, reference, progress, output_dir)
        if len(scored) < len(read):  # sweep.halving has stopped this job
            questions, asked, baseline = [], {}, None
            run = replace(run, evaluate=replace(run.evaluate, tasks=[]))
        answers = ask(engine, questions, run.decode, progress.generated)
        tasks, documents = _ask_lm_eval(engine, run.evaluate) if run.evaluate.tasks else ({}, [])
    evaluate_s, peak_memory = time.perf_counter() - start, report.peak_memory_of(engine)  # without the intervals
    samples = [*window_samples(scored, scores)] if scores else []
    samples += [*question_samples(asked, questions, answers), *documents]
    metrics = {
        **quality(scores, answers, run.evaluate.seed),
        "tasks": tasks,
        **({SHARE: len(scored) / len(read)} if run.sweep.halving and read else {}),
        "start_s": report.START_S,
        "load_s": load_s,
        "evaluate_s": evaluate_s,
        "weight_bytes": engine.executor.weight_bytes,
        "probe": engine.divergence and asdict(engine.divergence),
        "peak_memory_bytes": peak_memory,
    }
    _write(run, metrics, samples, baseline, output_dir, dump(run, output_dir))


def _read_data(run: RunConfig) -> tuple[list[Text], list[Question]]:
    evaluate = run.evaluate
    if evaluate.data is None and evaluate.questions is None and not evaluate.tasks:
        options = "evaluate.data=FILE, evaluate.questions=FILE.jsonl or evaluate.tasks=[NAME]"
        raise UserError(f"there is nothing to evaluate: give {options}, or several of them")
    if run.sweep.halving and evaluate.gate:
        problem = "evaluate.gate is not used with sweep.halving, whose jobs may score a part of the data"
        raise UserError(f"{problem}: leave one of them out")
    texts = [] if evaluate.data is None else read_texts(evaluate.data)
    questions = [] if evaluate.questions is None else read_questions(evaluate.questions)
    if not questions:
        run.decode.check_unset("without evaluate.questions", "leave it out, or ask questions")
    return texts, questions


def _read_baseline(evaluate: EvaluateConfig, asked: dict[str, str]) -> Baseline | None:
    """Return the run of evaluate.against. Raises UserError if it asked other questions than `asked`, by digest."""
    if evaluate.against is None:
        return None
    baseline = read_baseline(evaluate.against)
    baseline.check_data(QUESTION, asked)
    baseline.check_tasks(evaluate.tasks)
    return baseline


def _greedy(decode: DecodeConfig, engine: Engine) -> DecodeConfig:
    """Return the decode settings of questions, with unset values from the model. Raises UserError unless they are greedy."""
    decode = engine.requests.resolve(decode)
    for name, greedy in GREEDY.items():
        if (value := getattr(decode, name)) != greedy:
            remedy = "leave it out, or give decode=greedy"
            raise UserError(f"decode.{name}={value} is not used by task=evaluate, whose tokens are greedy: {remedy}")
    engine.requests.check(decode)
    return decode


def _windowed(evaluate: EvaluateConfig, engine: Engine) -> EvaluateConfig:
    """Return the settings with unset values from the model. Raises UserError for windows that the model does not take."""
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
    return replace(evaluate, window=window, stride=stride)


def _windows(evaluate: EvaluateConfig, token_ids: list[list[int]]) -> list[list[Window]]:
    """Return the windows of each text."""
    if not token_ids:
        return []
    assert evaluate.window is not None
    assert evaluate.stride is not None
    return [sliding_windows(ids, evaluate.window, evaluate.stride) for ids in token_ids]


def _ask_lm_eval(engine: Engine, evaluate: EvaluateConfig) -> tuple[dict[str, dict[str, Any]], list[Sample]]:
    try:
        from pipelines.tasks.lm_eval import evaluate_tasks
    except ImportError as error:
        raise UserError(f"evaluate.tasks needs the package lm-eval ({error}): pip install 'quintet[eval]'") from error
    return evaluate_tasks(engine, evaluate)


def _score(
    run: RunConfig,
    windows_by_text: list[list[Window]],
    inputs: dict[str, str],
    engine: Engine,
    reference: Engine | None,
    progress: report.ProgressSink,
    output_dir: Path,
) -> tuple[Scores | None, dict[str, str]]:
    """Return the scores, None without windows, and the inputs of the windows that are scored."""
    windows = [window for text_windows in windows_by_text for window in text_windows]
    total = sum(window.num_scored for window in windows)

    def on_step(num_tokens: int) -> None:
        progress.scored(num_tokens, total)

    if not windows:
        return None, inputs
    if not run.sweep.halving:
        return score(engine, windows, reference, on_step), inputs
    race = open_race(output_dir, reference is not None, run.evaluate.seed)
    return score_in_parts(engine, windows, inputs, reference, on_step, race)


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
    try:
        reference = load_float_engine(model, run.device, run.parallel, progress)
    except UserError as error:
        raise UserError(f"{where} cannot be loaded: {error}") from error
    if reference.vocab_size != engine.vocab_size:
        sizes = f"{reference.vocab_size} tokens, but the model's {engine.vocab_size}"
        raise UserError(f"{where} has a vocabulary of {sizes}: give the model that this one comes from")
    for text, expected in token_ids.items() if reference.tokenizer else ():
        if encode_text(reference.tokenizer, text) != expected:
            difference = f"another tokenizer, which reads {text.where} as other tokens"
            raise UserError(f"{where} has {difference}: give the model that this one comes from")
    return reference


def _compare(samples: list[Sample], baseline: Baseline, seed: int) -> tuple[Comparison, dict[str, str | bytes]]:
    """Return the comparison and its files. Raises UserError for documents of lm_eval that the baseline has not."""
    now = by_key(samples)
    baseline.check_data(DOCUMENT, {id: sample["input"] for (kind, id), sample in now.items() if kind == DOCUMENT})
    comparison = compare(now, baseline.samples, seed)
    files: dict[str, str | bytes] = {COMPARISON: comparison.as_json()}
    if picture := draw_comparison(now, baseline.samples):
        files[PICTURE] = picture
    return comparison, files


def _write(
    run: RunConfig,
    metrics: dict[str, Any],
    samples: list[Sample],
    baseline: Baseline | None,
    output_dir: Path,
    config: str,
) -> None:
    """Write the files and print the results. Raises Difference at the end if the gate is not passed."""
    files = {"metrics.json": json.dumps(metrics, indent=2) + "\n", SAMPLES: write_samples(samples)}
    comparison, compared_files = _compare(samples, baseline, run.evaluate.seed) if baseline else (None, {})
    report.write_run(output_dir, config, files | compared_files)
    for name in {COMPARISON, PICTURE} - compared_files.keys():
        (output_dir / name).unlink(missing_ok=True)  # of an earlier run in this folder
    _print(metrics, comparison, output_dir)
    check_gate(run.evaluate.gate or {}, metrics, comparison)


def _print(metrics: dict[str, Any], comparison: Comparison | None, output_dir: Path) -> None:
    def shown(name: str, style: str, unit: str = "", factor: float = 1.0, of: dict[str, Any] = metrics) -> str:
        if of[name] is None:
            return "-"
        stderr = of.get(f"{name}_stderr")
        spread = "" if stderr is None else f" ± {stderr * factor:{style}}"
        return f"{of[name] * factor:{style}}{spread}{unit}"

    report.print_table(
        [
            ("scored tokens", shown("num_scored_tokens", ",.0f")),
            ("negative log likelihood", shown("nll_per_token", ".5f", " per token")),
            ("perplexity", shown("perplexity", ",.4f")),
            ("KL divergence", shown("kl_mean", ".3g")),
            ("its 99th percentile", shown("kl_p99", ".3g")),
            ("equal most likely tokens", shown("top1_agreement", ".2f", " %", 100)),
            ("accuracy", shown("accuracy", ".2f", f" % of {metrics['num_questions']:,}", 100)),
            *(
                (f"{task}, {name}", shown(name, ".4f", of=task_metrics))
                for task, task_metrics in metrics["tasks"].items()
                for name in task_metrics
                if not name.endswith(("_stderr", "_ci95"))
            ),
            ("weights", shown("weight_bytes", ",.1f", " MB", 1e-6)),
            ("peak memory", shown("peak_memory_bytes", ",.0f", " MB", 1e-6)),
        ]
    )
    if comparison is not None:
        print("compared with evaluate.against:")
        report.print_columns(comparison_table(comparison))
        if comparison.changed:
            report.print_columns(changed_table(comparison))
    print(f"output: {output_dir}")

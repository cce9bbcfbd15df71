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
from pipelines.jobs.scoring import Scores, score, sliding_windows
from pipelines.loading.load_engine import load_engine, load_float_engine
from pipelines.tasks.evaluate_data import Text, encode_text, read_questions, read_texts, right_answers

DEFAULT_WINDOW = 512  # tokens
BATCH_SIZE = 16  # questions per batch
GREEDY = {"temperature": 0, "num_beams": 1, "penalty_alpha": 0, "n": 1, "logprobs": None, "prompt_logprobs": None}


def run_evaluate(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Measure and write the results.

    Raises UserError, before any file is written, for files, rows and models that cannot be measured.
    """
    data, questions_file = run.evaluate.data, run.evaluate.questions
    if data is None and questions_file is None and not run.evaluate.tasks:
        options = "evaluate.data=FILE, evaluate.questions=FILE.jsonl or evaluate.tasks=[NAME]"
        raise UserError(f"there is nothing to evaluate: give {options}, or several of them")
    texts = [] if data is None else read_texts(data)
    questions = [] if questions_file is None else read_questions(questions_file)
    if not questions:
        run.decode.check_unset("without evaluate.questions", "leave it out, or ask questions")
    start = time.perf_counter()
    with report.progress_bar() as progress:
        engine = load_engine(run, min(BATCH_SIZE, run.device.max_batched_tokens), progress)
        if engine.tokenizer is None:
            raise UserError("task=evaluate measures on text, but there is no tokenizer: give model.tokenizer=PATH")
        if questions_file is not None:
            run = replace(run, decode=_greedy(run.decode, engine))
        if data is not None:
            run = replace(run, evaluate=_windowed(run.evaluate, engine))
        token_ids = [encode_text(engine.tokenizer, text) for text in texts]
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
        "probe": engine.divergence and asdict(engine.divergence),
        "peak_memory_bytes": report.peak_memory_of(engine),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, output_dir)


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


def _ask_lm_eval(engine: Engine, evaluate: EvaluateConfig) -> dict[str, dict[str, float]]:
    try:
        from pipelines.tasks.lm_eval import evaluate_tasks
    except ImportError as error:
        raise UserError(f"evaluate.tasks needs the package lm-eval ({error}): pip install 'quintet[eval]'") from error
    return evaluate_tasks(engine, evaluate)


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


def _quality(scores: Scores | None, right: list[bool]) -> dict[str, Any]:
    return {
        "nll_per_token": scores and scores.nll_per_token,
        "perplexity": scores and scores.perplexity,
        "kl_mean": scores and scores.kl_mean,
        "kl_p99": scores and scores.kl_p99,
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
            ("its 99th percentile", shown("kl_p99", ".3g")),
            ("equal most likely tokens", shown("top1_agreement", ".2f", " %", 100)),
            ("accuracy", shown("accuracy", ".2f", f" % of {metrics['num_questions']:,}", 100)),
            *(
                (f"{task}, {name}", f"{value:.4f}")
                for task, task_metrics in metrics["tasks"].items()
                for name, value in task_metrics.items()
            ),
            ("weights", shown("weight_bytes", ",.1f", " MB", 1e-6)),
            ("peak memory", shown("peak_memory_bytes", ",.0f", " MB", 1e-6)),
        ]
    )
    print(f"output: {output_dir}")

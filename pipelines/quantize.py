"""`task=quantize`: a quantised model, made layer by layer, with a report of what that costs in quality.

A run that ended early is continued by the next one of the same model, settings and texts: finished layers are kept.
"""

import hashlib
import json
import logging
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf.errors import UserError, check
from conf.quantization import CalibrateConfig, KVCacheFormat, QuantConfig, QuantizeConfig, QuantScheme
from conf.schema import RunConfig, Weights
from models.batch import Batch, KVCache
from models.config import ConfigReader
from models.formats.hub import find_checkpoint
from models.formats.huggingface_writer import write_companions
from models.formats.manifest import MANIFEST, write_manifest
from models.layers.linear import tied_weight
from models.weights import refuse_damaged
from pipelines import report
from pipelines.assembly import assemble, find_and_open, is_quantized
from pipelines.calibration_data import CalibrationData, read_calibration_data
from pipelines.engine import Engine
from pipelines.engine.batch import whole_batch
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.fingerprint import calibration_fingerprint, file_fingerprint
from pipelines.journal import dumps
from pipelines.output_folder import complete_folder, only_maker, refuse_existing
from pipelines.quantize_preflight import preflight, print_preflight
from pipelines.quantize_report import Predictions, perplexity, write_report
from quantization.artefact import Artefact, LayoutOf
from quantization.calibration import PROBE_TOKENS, SequentialCalibrator
from quantization.file_layout import file_layout
from quantization.kv_scales import place_kv_scales, static_kv_formats
from quantization.quantizer import LinearReport, Quantizer, is_sequential, parts_of
from quantization.scheme import LinearScheme

log = logging.getLogger(__name__)

JOB = "job.json"
VERSION = 2  # of what the same settings make: raise it with every change of codes, scales or what is observed
MADE = report.REPOSITORY / "outputs" / "quantized"  # models that were made without a name


def run_quantize(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Raises UserError for what cannot be quantised; layers that are finished by then are kept for the next run."""
    run.decode.check_unset("by task=quantize", "leave it out")
    kv_cache, is_static, activations = run.quant.kv_cache, run.quant.has_static_kv_cache, run.quant.activations
    wanted = "int8, int4, a8w8 or fp8 with task=quantize, or quant.kv_cache_scales=static"
    check(is_static or run.quant.scheme is not QuantScheme.none, "quant", "none", wanted)
    later = "with task=quantize and give it when the model is used"
    check(not run.model.keep_packed, "model.keep_packed", "true", f"false {later}")
    wanted = f"none {later}, or quant.kv_cache_scales=static"
    check(is_static or kv_cache is KVCacheFormat.none, "quant.kv_cache", kv_cache.name, wanted)
    check(activations is activations.of_model, "quant.activations", activations.name, f"none {later}")
    if is_quantized(run.model):
        raise UserError(f"model.path={run.model.path} is quantised already: give the float model that it was made of")
    run = replace(run, calibrate=run.calibrate.resolved(run.quant))
    if run.quantize.dry_run:
        print_preflight(run)
        return
    start, given = time.perf_counter(), run.quantize.output
    target = _default_target(run) if given is None else Path(os.path.abspath(Path(given).expanduser()))
    refuse_existing(target, run.quantize.overwrite, "quantize")
    with nullcontext() if given else only_maker(target), report.progress_bar() as progress:
        refuse_existing(target, run.quantize.overwrite, "quantize")  # another run may have made it meanwhile
        metrics = _make(run, target, progress, with_report=True)
    metrics |= {"quantize_s": time.perf_counter() - start}
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, target, output_dir)


def find_or_make(run: RunConfig, progress: report.ProgressSink) -> Path:
    """The folder of the model that `quant` makes of `model` on the texts of `calibrate`, made now if it was not yet. Raises UserError.

    Only task=quantize measures what it costs: that takes longer than a short calibration.
    """
    run = replace(run, calibrate=run.calibrate.resolved(run.quant))
    target = _default_target(run)
    if (target / MANIFEST).is_file():
        return target
    with only_maker(target):
        if not (target / MANIFEST).is_file():  # another process may have made it meanwhile
            _make(run, target, progress, with_report=False)
    return target


def _default_target(run: RunConfig) -> Path:
    """A folder whose name tells apart weights, quantisation and calibration."""
    digest = hashlib.sha256(dumps(_job(run)).encode()).hexdigest()
    name = Path(run.model.path).resolve().name if Path(run.model.path).exists() else run.model.path.replace("/", "_")
    cache = f"-kv_{run.quant.kv_cache.name}" if run.quant.has_static_kv_cache else ""
    return MADE / f"{name}-{run.quant.scheme.name}-{run.quant.method.name}{cache}-{digest[:12]}"


def _job(run: RunConfig) -> dict[str, Any]:
    """What decides the outcome: the model's files, how they are quantised, and on which texts."""
    if run.model.weights is not Weights.checkpoint:
        raise UserError(
            "model.weights=random has nothing to calibrate: leave it out, or give quant.method=rtn with dynamic activations, "
            "which calibrates nothing"
        )
    path = find_checkpoint(run.model.path, True, run.model.allow_pickle)
    cache = () if run.quant.has_static_kv_cache else ("kv_cache", "kv_cache_scales")
    quant = {key: value for key, value in asdict(run.quant).items() if key not in cache}
    quant |= {"activations": run.quant.activations.of_model}
    tokenizer = run.model.tokenizer
    job = {
        "version": VERSION,
        "quant": quant,
        **calibration_fingerprint(run),
        "dtype": run.model.dtype,
        "max_length": run.model.max_length,
        "tokenizer": tokenizer and file_fingerprint(Path(tokenizer).expanduser(), "tokenizer"),
        "files": file_fingerprint(path, "model"),
    }
    return dict(json.loads(json.dumps(job, default=lambda value: value.name)))


def _make(run: RunConfig, target: Path, progress: report.ProgressSink, with_report: bool) -> dict[str, Any]:
    """Quantise into the folder `target`; metrics, for a report those of held-out text, too."""
    samples = f"{run.calibrate.num_samples} samples of at most {run.calibrate.sequence_length} tokens"
    what = f"{run.model.path} by quant={run.quant.scheme.name}"
    log.warning("calibrating %s on %s: %s; it is kept in %s", what, samples, preflight(run).duration, target)
    with progress.calibrating():
        return _calibrate(run, target, progress, with_report)


def _calibrate(run: RunConfig, target: Path, progress: report.ProgressSink, with_report: bool) -> dict[str, Any]:
    source = replace(run.model, keep_packed=False)  # it is read once
    float_run = replace(run, model=source, quant=QuantConfig(), calibrate=CalibrateConfig(), quantize=QuantizeConfig())
    engine = assemble(float_run, 1, progress.loaded, packed=False)
    data = read_calibration_data(run.calibrate, engine.tokenizer, engine.context.num_tokens, engine.sees_later_tokens)
    model, static_cache = engine.runner.model, run.quant.kv_cache if run.quant.has_static_kv_cache else None
    refuse_damaged(model)
    bytes_before = engine.runner.weight_bytes
    layout = file_layout(model, run.quant, run.quantize.format)
    with complete_folder(target, run.quantize.overwrite, "quantize", resumable=True) as folder:
        artefact = _begin(folder, _job(run), layout.layout_of)
        parts = parts_of(model, layout.schemes)
        artefact.write_rest(model, parts)
        before = Predictions(engine, data.held_out) if with_report else None
        if static_cache:
            place_kv_scales(model, per_head=True, found={})
        reports = _quantize(run.quant, engine, data, artefact, layout.schemes, progress)
        metrics: dict[str, Any] = {
            "num_layers": len(reports),
            "weight_bytes_before": bytes_before,
            "weight_bytes": engine.runner.weight_bytes,
            "peak_memory_bytes": report.peak_memory_bytes(engine.device),
        }
        if before is not None:
            if static_cache:
                _quantize_cache(engine, static_cache)
            metrics |= before.compared_with(engine)
            write_report(folder, run, data.source, reports, metrics)
        _finish(run, engine, artefact, layout.config)
    return metrics


def _begin(folder: Path, job: dict[str, Any], layout_of: LayoutOf) -> Artefact:
    """What is there of the same job is kept, anything else is removed."""
    try:
        same = json.loads((folder / JOB).read_text(encoding="utf-8")) == job
    except (OSError, ValueError):
        same = False
    if not same:
        for file in folder.iterdir():
            file.unlink()
        (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
    return Artefact(folder, layout_of)


def _quantize(
    config: QuantConfig,
    engine: Engine,
    data: CalibrationData,
    artefact: Artefact,
    schemes: dict[str, LinearScheme],
    progress: report.ProgressSink,
) -> list[LinearReport]:
    """All parts in their order; those that an earlier run finished are read."""
    model, cache = engine.runner.model, engine.runner.cache
    # a batch is computed in one step: layers need not remember
    one_layer = KVCache([cache.layers[0]] * len(cache.layers))
    batches, probe = _batches(engine, data.samples)
    calibrator = SequentialCalibrator(
        model, batches, probe, one_layer, is_sequential(config), config.has_static_kv_cache
    )
    quantizer, reports = Quantizer(model, config, calibrator), []
    parts = parts_of(model, schemes)
    for i, part in enumerate(parts):
        if artefact.has(part):
            if part.index < len(model.layers):
                calibrator.observe()
            reports += artefact.read(part, model)
            if part.index < len(model.layers):
                calibrator.advance()
        else:
            stored, new = quantizer.quantize(part)
            artefact.write(part, model, stored, new)
            reports += new
        progress.quantized(i + 1, len(parts))
    return reports


def _quantize_cache(engine: Engine, format: KVCacheFormat) -> None:
    """Give the engine a cache under the scales that its model has now."""
    model, old = engine.runner.model, engine.runner.cache
    formats = static_kv_formats(model, format)
    cache = allocate_kv_cache(
        model.attention_heads, engine.num_blocks, engine.block_size, formats, old.dtype, engine.device
    )
    engine.run_over(model, cache)


def _batches(engine: Engine, samples: list[list[int]]) -> tuple[list[Batch], Batch]:
    """All samples, as many in a batch as a step takes; and the beginning of the first, or all of it where its tokens see later ones."""
    longest = max(map(len, samples))
    num_at_once = engine.num_at_once(longest)
    if not num_at_once:
        raise UserError(
            f"a sample of {longest} tokens is more than device.max_batched_tokens, or than the KV cache holds: "
            "give a smaller calibrate.sequence_length"
        )
    width = -(-longest // engine.block_size)  # blocks of a sample

    def batch(prompts: list[list[int]]) -> Batch:
        tables = [list(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
        features = [engine.runner.prompt_features(prompt) for prompt in prompts]
        return engine.runner.on_device(
            whole_batch(prompts, list(map(len, prompts)), tables, features, engine.block_size)
        )

    probe = samples[0] if engine.sees_later_tokens else samples[0][:PROBE_TOKENS]
    return [batch(samples[i : i + num_at_once]) for i in range(0, len(samples), num_at_once)], batch([probe])


def _finish(run: RunConfig, engine: Engine, artefact: Artefact, quantization_config: dict[str, Any]) -> None:
    checkpoint = find_and_open(run.model)
    changed: dict[str, Any] = {"quantization_config": quantization_config}
    if tied_weight(engine.runner.model.head) is None:  # its own, or in codes beside an embedding in floats
        changed["tie_word_embeddings"] = False
    config = ConfigReader(checkpoint.config.values | changed, "config.json")
    artefact.write_index()
    write_companions(replace(checkpoint, config=config), artefact.folder, engine.dtype)
    (artefact.folder / JOB).unlink()
    write_manifest(artefact.folder, {})


def _print(metrics: dict[str, Any], target: Path, output_dir: Path) -> None:
    report.print_table(
        [
            ("layers", f"{metrics['num_layers']:,}"),
            (
                "weights",
                f"{metrics['weight_bytes_before'] / 1e6:,.1f} MB before, {metrics['weight_bytes'] / 1e6:,.1f} MB now",
            ),
            (
                "perplexity",
                f"{perplexity(metrics['perplexity_before'])} before, {perplexity(metrics['perplexity'])} now",
            ),
            ("KL divergence", f"{metrics['kl_mean']:.3g}"),
            ("equal most likely tokens", f"{metrics['top1_agreement']:.2%}"),
            ("time", f"{metrics['quantize_s']:.1f} s"),
            ("peak memory", f"{metrics['peak_memory_bytes'] / 1e6:,.0f} MB"),
        ]
    )
    print(f"model: {target}")
    print(f"output: {output_dir}")
